"""Tensors of a checkpoint that are read part by part: a rank that needs a share reads no more than that."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from service.jobs.checkpoints import require
from service.parallel.checkpoint.shards import SHARDING

Block = tuple[slice, ...]
"""A start and a stop in every dimension."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Holds what one file has of a tensor: the block that begins at ``offsets``. ``content`` gives parts of it,
    mapped.
    """

    content: Any
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def within(self, wanted: Block) -> Block | None:
        """Return the part of ``wanted``, in the whole tensor's numbers, that is in this piece."""
        found = tuple(
            slice(max(own.start, start), min(own.stop, start + length))
            for own, start, length in zip(wanted, self.offsets, self.shape, strict=True)
        )
        return found if all(each.start < each.stop for each in found) else None

    def read(self, part: Block) -> Tensor:
        found: Tensor = self.content[moved(part, self.offsets)]
        return found


@dataclass(frozen=True, eq=False)
class Stored:
    """A whole tensor in the files of a checkpoint, which stay open: removing them takes nothing away."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> torch.Size:
        """Return where its last piece ends."""
        ends = ([at + length for at, length in zip(each.offsets, each.shape, strict=True)] for each in self.pieces)
        return torch.Size(max(dimension) for dimension in zip(*ends, strict=True))

    def __getitem__(self, wanted: Block) -> Tensor:
        """Return a block on the CPU; not to be written to, as it may be mapped. ``ValueError`` where files
        lack a part.
        """
        found = [(part, each.read(part)) for each in self.pieces if (part := each.within(wanted)) is not None]
        shape = [own.stop - own.start for own in wanted]
        if len(found) == 1 and list(found[0][1].shape) == shape:
            return found[0][1]
        nothing = (slice(0, 0),) * len(shape)
        block = torch.empty(shape, dtype=self.pieces[0].read(nothing).dtype)
        if sum(part.numel() for _, part in found) != block.numel():
            raise ValueError(f"the checkpoint has not all of {self.name!r}")
        for part, values in found:
            block[moved(part, [own.start for own in wanted])] = values
        return block

    def whole(self) -> Tensor:
        return self[tuple(slice(0, length) for length in self.shape)]


def stored(path: Path, prefix: str = "") -> dict[str, Stored]:
    """Return the tensors whose names start with ``prefix`` (which is cut off), under global names; no collective.

    Raises ``ValueError`` when ``path`` isn't a complete checkpoint.
    """
    require(path)
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for file in sorted(path.glob("*.safetensors")):
        for name, piece in _pieces(file):
            if name.startswith(prefix):
                pieces[name.removeprefix(prefix)].append(piece)
    return {name: Stored(name, tuple(found)) for name, found in pieces.items()}


def _pieces(file: Path) -> Iterator[tuple[str, Piece]]:
    opened: Any = safe_open(file, framework="pt")
    places = json.loads((opened.metadata() or {}).get(SHARDING, "{}"))
    for name in opened.keys():  # noqa: SIM118 - not a mapping
        content = opened.get_slice(name)
        shape = tuple(content.get_shape())
        offsets = places[name]["saved_offsets"] if name in places else [0] * len(shape)
        yield name, Piece(content, tuple(offsets), shape)


def moved(part: Block, start: tuple[int, ...] | list[int]) -> Block:
    """Return the same block, counted from ``start``."""
    return tuple(slice(own.start - at, own.stop - at) for own, at in zip(part, start, strict=True))
