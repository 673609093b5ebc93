"""Token ids in one long row on disk, mapped into memory and cut into sequences as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from service.formats.arrays import held_out
from service.formats.tokens import count_ids, count_sequences
from service.jobs.spec.data import FileTokens
from service.models.data.sources import OnDisk, Split

CHECKED_WHOLE = 2**26
"""The most ids that are all checked when a file is opened; of a larger one, evenly spaced windows are. Every batch is
checked when it is read.
"""
WINDOWS, WINDOW = 1024, 2**14

Ids = NDArray[Any]


@dataclass(frozen=True)
class PackedTokens(OnDisk):
    """Sequences ``first`` to ``first + count`` of a row of ids; the last target of one begins the next."""

    ids: Ids
    length: int
    vocabulary: int
    field: str
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def sequence(self) -> int | None:
        return self.length

    def take(self, indices: Tensor) -> Split:
        rows = np.empty((len(indices), self.length + 1), dtype=np.int64)
        for row, index in zip(rows, indices.tolist(), strict=True):
            start = (self.first + index) * self.length
            row[:] = self.ids[start : start + self.length + 1]
        check_ids(rows, self.vocabulary, f"{self.field} holds")
        tokens = torch.from_numpy(rows)
        return Split(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def open_tokens(path: Path, encoding: str, spec: FileTokens, field: str) -> PackedTokens:
    """Return all sequences of a file of ids: ``encoding`` is ``npy``, or the type of a flat array. ``ValueError`` with
    the field where it holds no sequence, or an id that is too large.
    """
    ids = _map(path, encoding, field)
    count = count_sequences(len(ids), spec, field)
    for window in _windows(ids):
        check_ids(window, spec.vocabulary, f"{field} holds")
    return PackedTokens(ids, spec.sequence, spec.vocabulary, field, 0, count)


def divide(tokens: PackedTokens, spec: FileTokens) -> tuple[PackedTokens, PackedTokens]:
    """Divide into training and test split, which is the end."""
    held = held_out(len(tokens), spec.test_fraction, f"{tokens.field} holds {len(tokens)} sequences of {tokens.length}")
    rest = len(tokens) - held
    return replace(tokens, count=rest), replace(tokens, first=rest, count=held)


def check_ids(ids: Ids, vocabulary: int, who_has: str, question: str = "is the encoding right?") -> None:
    """Raise ``ValueError`` for an id that is no number of a token; ``who_has`` begins the sentence."""
    highest, lowest = int(ids.max(initial=0)), int(ids.min(initial=0))
    if highest >= vocabulary or lowest < 0:
        worst = highest if highest >= vocabulary else lowest
        raise ValueError(
            f"{who_has} the token id {worst}; data.vocabulary={vocabulary} allows 0 to {vocabulary - 1} ({question})"
        )


def _windows(ids: Ids) -> Iterator[Ids]:
    if len(ids) <= CHECKED_WHOLE:
        yield ids
        return
    for start in range(0, len(ids), (len(ids) - WINDOW) // WINDOWS):
        yield ids[start : start + WINDOW]


def _map(path: Path, encoding: str, field: str) -> Ids:
    count = count_ids(path, encoding, field)
    if encoding == "npy":
        ids: Ids = open_memmap(path, mode="r")
        return ids
    kind = np.dtype(encoding).newbyteorder("<")
    # An empty file cannot be mapped.
    return np.memmap(path, kind, mode="r") if count else np.empty(0, kind)
