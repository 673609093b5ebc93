"""Saving and loading: sharded safetensors files that any layout can read.

Tensors are saved and resharded by ``torch.distributed.checkpoint`` under global names, each rank writing its own
shards. The safetensors form is used, and not DCP's own, because the latter's metadata is a pickle.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from service.jobs.checkpoints import Checkpoint, require
from service.parallel.checkpoint import folder as folders
from service.parallel.checkpoint.shards import ShardWriter
from service.parallel.checkpoint.stored import stored
from service.parallel.checkpoint.unpadded import UnpaddedLoadPlanner, UnpaddedSavePlanner


class PublishError(RuntimeError):
    """The first rank could not write a file on behalf of all."""


def save(
    folder: Path,
    step: int,
    state: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: int = 2,
    *,
    rows: Mapping[str, int] | None = None,
    group: ProcessGroup | None = None,
) -> Checkpoint:
    """Publish ``state`` as ``folder/step_<step>``; all ranks call this with the tensors they hold.

    A DTensor is written as its global tensor; a plain tensor under one name must be equal on every rank that has
    it. ``rows`` says of tensors with padding how many rows come before it: those are written. Afterwards only the
    ``keep`` newest checkpoints remain. A step that is already published is left as it is.
    ``group`` spans all ranks (the default group when absent). A write that fails anywhere raises on every rank.
    """
    working = folders.working_folder(folder, step)
    on_first_rank(lambda: _make_anew(working), f"make {working}", group)
    with _no_group_meant(not _distributed()):
        dcp_save(
            dict(state),
            storage_writer=ShardWriter(working),
            planner=UnpaddedSavePlanner(rows or {}),
            process_group=group,
            no_dist=not _distributed(),
        )
    target = folder / f"step_{step}"
    on_first_rank(lambda: folders.publish(folder, step, meta, keep), f"publish {target}", group)
    return require(target)


def load(path: Path, state: Mapping[str, Tensor], *, rows: Mapping[str, int] | None = None) -> Checkpoint:
    """Fill the tensors of ``state`` in place, whatever layout saved them; all ranks call this. ``rows`` are those of
    :func:`save`; padding stays as it is.

    Raises ``ValueError`` when ``path`` isn't a complete checkpoint, lacks a name or holds it in another shape.
    """
    checkpoint = require(path)
    reader = HuggingFaceStorageReader(str(path))
    rows = rows or {}
    _check_fits(path, reader, state, rows)
    with _no_group_meant(not _distributed()):
        planner = UnpaddedLoadPlanner(rows)
        dcp_load(dict(state), storage_reader=reader, planner=planner, no_dist=not _distributed())
    return checkpoint


def load_whole(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return the unsharded tensors whose names start with ``prefix`` (which is cut off), on the CPU; no collective.

    They may be mapped, and are not to be written to.
    """
    return {name: tensor.whole() for name, tensor in stored(path, prefix).items()}


def on_first_rank(act: Callable[[], None], what: str, group: ProcessGroup | None = None) -> None:
    """Run ``act`` on the first rank while the others wait for it; all ranks of ``group`` call this together.

    An ``OSError`` of ``act`` is raised on the first rank, and :class:`PublishError`, which says what rank 0 could not
    do, on all others.
    """
    failed: OSError | None = None
    if _is_first_rank():
        try:
            act()
        except OSError as error:
            failed = error
    if _distributed():
        outcome = [None if failed is None else str(failed)]
        dist.broadcast_object_list(outcome, src=0, group=group, device=torch.device("cpu"))
        if failed is None and outcome[0] is not None:
            raise PublishError(f"rank 0 could not {what}: {outcome[0]}")
    if failed is not None:
        raise failed


def _make_anew(working: Path) -> None:
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)


def _check_fits(
    path: Path, reader: HuggingFaceStorageReader, state: Mapping[str, Tensor], rows: Mapping[str, int]
) -> None:
    """Refuse before DCP's planner does, with a message that names the first tensor that doesn't fit."""
    held = _contents(reader)
    for name, tensor in state.items():
        if name not in held:
            raise ValueError(f"{path} holds no tensor {name!r}: it was saved from another model")
        shape, wanted = tuple(held[name].size), tuple(tensor.shape)
        if name in rows:
            wanted = (rows[name], *wanted[1:])
        if shape != wanted:
            raise ValueError(f"{path} holds {name!r} in shape {shape}; this model has it in {wanted}")


def _contents(reader: HuggingFaceStorageReader) -> dict[str, TensorStorageMetadata]:
    entries = reader.read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


@contextmanager
def _no_group_meant(alone: bool) -> Iterator[None]:
    """Silence DCP's warning about working in one process where that is meant."""
    if not alone:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _is_first_rank() -> bool:
    return not _distributed() or dist.get_rank() == 0
