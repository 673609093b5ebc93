"""Checkpoints that any layout can load: sharded safetensors files, published atomically.

Tensors are saved and resharded by ``torch.distributed.checkpoint`` under global names, each rank writing its own
shards. The safetensors form is used, and not DCP's own, because the latter's metadata is a pickle. A folder
``step_<n>`` appears under its name only when it is complete and on disk; its ``meta.json`` lists the files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

META = "meta.json"
FILES = "files"
_PUBLISHED = re.compile(r"step_(\d+)")
_UNFINISHED = ".unfinished_"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    meta: Mapping[str, Any]


def save(folder: Path, step: int, state: Mapping[str, Tensor], meta: Mapping[str, Any], keep: int = 2) -> Checkpoint:
    """Publish ``state`` as ``folder/step_<step>``; all ranks call this with the tensors they hold.

    A DTensor is written as its global tensor; a plain tensor under one name must be equal on every rank that has
    it. Afterwards only the ``keep`` newest checkpoints remain. A step that is already published is left as it is.
    """
    working = folder / f"{_UNFINISHED}step_{step}"
    if _is_first_rank():
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir(parents=True)
    _wait_for_all()
    writer = HuggingFaceStorageWriter(str(working), save_distributed=True)
    with _no_group_meant(not _distributed()):
        dcp_save(dict(state), storage_writer=writer, no_dist=not _distributed())
    if _is_first_rank():
        _publish(working, folder / f"step_{step}", {"step": step, **meta})
        _prune(folder, keep)
    _wait_for_all()
    return require(folder / f"step_{step}")


def load(path: Path, state: Mapping[str, Tensor]) -> Checkpoint:
    """Fill the tensors of ``state`` in place, whatever layout saved them; all ranks call this.

    Raises ``ValueError`` when ``path`` isn't a complete checkpoint, lacks a name or holds it in another shape.
    """
    checkpoint = require(path)
    reader = HuggingFaceStorageReader(str(path))
    _check_fits(path, reader, state)
    with _no_group_meant(not _distributed()):
        dcp_load(dict(state), storage_reader=reader, no_dist=not _distributed())
    return checkpoint


def load_whole(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The unsharded tensors whose names start with ``prefix`` (which is cut off), on the CPU; no collective."""
    require(path)
    reader = HuggingFaceStorageReader(str(path))
    whole = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _contents(reader).items()
        if name.startswith(prefix)
    }
    with _no_group_meant(True):
        dcp_load(whole, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in whole.items()}


def complete(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints under ``folder``, oldest first; half-written and foreign entries are ignored."""
    if not folder.is_dir():
        return []
    found = (read(path) for path in folder.iterdir())
    return sorted((checkpoint for checkpoint in found if checkpoint is not None), key=lambda found: found.step)


def latest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint under ``folder``."""
    return next(reversed(complete(folder)), None)


def read(path: Path) -> Checkpoint | None:
    """The checkpoint at ``path``, or None unless every file that it lists is there in full."""
    matched = _PUBLISHED.fullmatch(path.name)
    if matched is None:
        return None
    try:
        meta = json.loads((path / META).read_bytes())
        intact = all((path / name).stat().st_size == size for name, size in meta[FILES].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Checkpoint(int(matched[1]), path, meta) if intact else None


def require(path: Path) -> Checkpoint:
    """The checkpoint at ``path``; raises ``ValueError`` unless it is complete."""
    checkpoint = read(path)
    if checkpoint is None:
        raise ValueError(f"{path} is not a complete checkpoint: {META} or a file that it lists is missing or cut short")
    return checkpoint


def _publish(working: Path, target: Path, meta: Mapping[str, Any]) -> None:
    if read(target) is not None:
        return
    files = sorted(path for path in working.iterdir() if path.is_file())
    for path in files:
        _flush(path)
    sizes = {path.name: path.stat().st_size for path in files}
    (working / META).write_text(json.dumps({**meta, FILES: sizes}, indent=2))
    _flush(working / META)
    _flush(working)
    shutil.rmtree(target, ignore_errors=True)  # what is left there is damaged
    working.rename(target)
    _flush(target.parent)


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest, and what interrupted saves have left."""
    for checkpoint in complete(folder)[:-keep]:
        checkpoint.path.rename(folder / f"{_UNFINISHED}old_{checkpoint.path.name}")
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _check_fits(path: Path, reader: HuggingFaceStorageReader, state: Mapping[str, Tensor]) -> None:
    """Refuse before DCP's planner does, with a message that names the first tensor that doesn't fit."""
    held = _contents(reader)
    for name, tensor in state.items():
        if name not in held:
            raise ValueError(f"{path} holds no tensor {name!r}: it was saved from another model")
        shape = tuple(held[name].size)
        if shape != tuple(tensor.shape):
            raise ValueError(f"{path} holds {name!r} in shape {shape}; this model has it in {tuple(tensor.shape)}")


def _contents(reader: HuggingFaceStorageReader) -> dict[str, TensorStorageMetadata]:
    entries = reader.read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _flush(path: Path) -> None:
    """Force a file or folder to disk: a rename is only a promise about contents that are there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _no_group_meant(alone: bool) -> Iterator[None]:
    """Silence DCP's warning about working in one process where that is meant."""
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _is_first_rank() -> bool:
    return not _distributed() or dist.get_rank() == 0


def _wait_for_all() -> None:
    if _distributed():
        dist.barrier()
