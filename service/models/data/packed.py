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

from service.formats.arrays import BROKEN, check_claim
from service.jobs.spec.data import FileTokens
from service.models.data.sources import Split

CHECKED_WHOLE = 2**26
"""The most ids that are all checked when a file is opened; of a larger one, evenly spaced windows are. Every batch is
checked when it is read.
"""
WINDOWS, WINDOW = 1024, 2**14

Ids = NDArray[Any]


@dataclass(frozen=True)
class TokenFile:
    """A file of ids: ``encoding`` is ``npy``, or the type of a flat array."""

    path: Path
    encoding: str


@dataclass(frozen=True)
class PackedTokens:
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

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def take(self, indices: Tensor) -> Split:
        rows = np.empty((len(indices), self.length + 1), dtype=np.int64)
        for row, index in zip(rows, indices.tolist(), strict=True):
            start = (self.first + index) * self.length
            row[:] = self.ids[start : start + self.length + 1]
        check_ids(rows, self.vocabulary, f"{self.field} holds")
        tokens = torch.from_numpy(rows)
        return Split(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def to(self, device: torch.device) -> PackedTokens:
        """Return the samples unchanged: they stay on disk."""
        return self


def open_tokens(file: TokenFile, spec: FileTokens, field: str) -> PackedTokens:
    """Return all sequences of a file. ``ValueError`` with the field where it holds no sequence, or an id that is too
    large.
    """
    ids = _map(file, field)
    count = (len(ids) - 1) // spec.sequence
    if count < 1:
        raise ValueError(
            f"{field} holds {len(ids)} tokens; data.sequence={spec.sequence} needs at least {spec.sequence + 1}"
        )
    for window in _windows(ids):
        check_ids(window, spec.vocabulary, f"{field} holds")
    return PackedTokens(ids, spec.sequence, spec.vocabulary, field, 0, count)


def divide(tokens: PackedTokens, test_fraction: float) -> tuple[PackedTokens, PackedTokens]:
    """Divide into training and test split, the last ``test_fraction``: at least one sequence."""
    held_out = max(int(len(tokens) * test_fraction), 1)
    rest = len(tokens) - held_out
    if rest < 1:
        raise ValueError(f"{tokens.field} holds {len(tokens)} sequences of {tokens.length}: too few for a test split")
    return replace(tokens, count=rest), replace(tokens, first=rest, count=held_out)


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


def _map(file: TokenFile, field: str) -> Ids:
    if file.encoding == "npy":
        return _map_npy(file.path, field)
    kind = np.dtype(file.encoding).newbyteorder("<")
    size = file.path.stat().st_size
    if size % kind.itemsize:
        raise ValueError(f"{field} has {size} bytes, which are no whole number of {file.encoding} ids")
    # An empty file cannot be mapped.
    return np.memmap(file.path, kind, mode="r") if size else np.empty(0, kind)


def _map_npy(path: Path, field: str) -> Ids:
    try:
        with path.open("rb") as file:
            check_claim(file, path.stat().st_size)
        ids: Ids = open_memmap(path, mode="r")
    except BROKEN as error:
        raise ValueError(f"{field} is no array in NumPy's format: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{field} holds {ids.dtype} of shape {ids.shape}; expected one row of integers")
    return ids
