"""Writes a rank's shards of a checkpoint, and reads back only the parts that a rank needs."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from service.jobs.files import flush, require
from service.parallel.distributed import rank_and_size


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first_damaged(folder: Path, digests: Mapping[str, str]) -> str | None:
    """Return the first of the files in ``folder``, by name, whose content has another digest; ``None`` if none has.

    All ranks call it together: each reads its share of the files. Raises ``OSError`` for one that cannot be read.
    """
    rank, ranks = rank_and_size()
    names = sorted(digests)
    own = (index for index in range(rank, len(names), ranks))
    wrong = (index for index in own if digest_of(folder / names[index]) != digests[names[index]])
    found = torch.tensor(next(wrong, len(names)))
    if ranks > 1:
        dist.all_reduce(found, dist.ReduceOp.MIN)
    return None if found == len(names) else names[int(found)]


Block = tuple[slice, ...]
"""A start and a stop in every dimension."""


@dataclass(frozen=True, eq=False)
class _Piece:
    """Holds one file's block of a tensor, which begins at ``offsets``. ``content`` reads parts of it, mapped."""

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
        found: Tensor = self.content[_move_block(part, self.offsets)]
        return found


@dataclass(frozen=True, eq=False)
class Stored:
    """A whole tensor in the files of a checkpoint, which stay open: it survives their removal."""

    name: str
    pieces: tuple[_Piece, ...]

    @property
    def shape(self) -> torch.Size:
        """Return the end of its last piece."""
        ends = ([at + length for at, length in zip(each.offsets, each.shape, strict=True)] for each in self.pieces)
        return torch.Size(max(dimension) for dimension in zip(*ends, strict=True))

    def __getitem__(self, wanted: Block) -> Tensor:
        """Return a block on the CPU; do not write to it, as it may be mapped. ``ValueError`` if files lack a part."""
        found = [(part, each.read(part)) for each in self.pieces if (part := each.within(wanted)) is not None]
        shape = [own.stop - own.start for own in wanted]
        if len(found) == 1 and list(found[0][1].shape) == shape:
            return found[0][1]
        nothing = (slice(0, 0),) * len(shape)
        block = torch.empty(shape, dtype=self.pieces[0].read(nothing).dtype)
        if sum(part.numel() for _, part in found) != block.numel():
            raise ValueError(f"the checkpoint has not all of {self.name!r}")
        for part, values in found:
            block[_move_block(part, [own.start for own in wanted])] = values
        return block

    def whole(self) -> Tensor:
        return self[tuple(slice(0, length) for length in self.shape)]


def stored(path: Path, prefix: str = "") -> dict[str, Stored]:
    """Return the tensors whose names start with ``prefix`` (which is cut off), under global names; no collective.

    Raises ``ValueError`` when ``path`` isn't a complete checkpoint.
    """
    require(path)
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    for file in sorted(path.glob("*.safetensors")):
        for name, piece in _pieces(file):
            if name.startswith(prefix):
                pieces[name.removeprefix(prefix)].append(piece)
    return {name: Stored(name, tuple(found)) for name, found in pieces.items()}


def _pieces(file: Path) -> Iterator[tuple[str, _Piece]]:
    opened: Any = safe_open(file, framework="pt")
    places = json.loads((opened.metadata() or {}).get(SHARDING, "{}"))
    for name in opened.keys():  # noqa: SIM118 - not a mapping
        content = opened.get_slice(name)
        shape = tuple(content.get_shape())
        offsets = places[name]["saved_offsets"] if name in places else [0] * len(shape)
        yield name, _Piece(content, tuple(offsets), shape)


def _move_block(part: Block, start: tuple[int, ...] | list[int]) -> Block:
    """Return the same block, counted from ``start``."""
    return tuple(slice(own.start - at, own.stop - at) for own, at in zip(part, start, strict=True))


SHARDING, VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
"""Keys of a file's metadata in which torch's reader finds the place of each shard in its tensor."""


class ShardWriter(HuggingFaceStorageWriter):
    """Writes the same files as torch's writer with ``save_distributed``, without a copy of the whole file in
    memory: in a third of the time. Every rank has one file.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder
        # Of all ranks' files, by name: known to the first rank when all are written.
        self.digests: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = Future()
        tensors = {item.index.fqn: _alone(planner.resolve_data(item)) for item in plan.items}
        file = self._write(plan, tensors) if plan.items else None
        written.set_result([WriteResult(item.index, tensors[item.index.fqn].nbytes, file) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.digests = {name: digest for own in results for name, digest in (each.storage_data for each in own[:1])}

    def _write(self, plan: SavePlan, tensors: dict[str, Tensor]) -> tuple[str, str]:
        """Write this rank's file; return its name and digest."""
        places = {item.index.fqn: {"saved_offsets": list(_chunk(item).offsets)} for item in plan.items}
        path = self._folder / f"shard-{plan.storage_data['shard_index']:05}.safetensors"
        save_file(tensors, path, metadata={SHARDING: json.dumps(places), VERSION: "1.0", "format": "pt"})
        flush(path)
        return path.name, digest_of(path)


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is no tensor")
    return item.tensor_data.chunk


def _alone(tensor: Tensor | BytesIO) -> Tensor:
    """Return the tensor on the CPU, without the rest of its storage."""
    if isinstance(tensor, BytesIO):
        raise TypeError("a checkpoint holds tensors only")
    own = tensor.detach().cpu()
    return own if own.untyped_storage().nbytes() == own.nbytes and own.is_contiguous() else own.clone().contiguous()
