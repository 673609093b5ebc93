"""Saving and loading: sharded safetensors files that any layout can read.

Tensors are saved and resharded by ``torch.distributed.checkpoint`` under global names, each rank writing its own
shards. The safetensors form is used, and not DCP's own, because the latter's metadata is a pickle.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from service.jobs.files import DIGESTS, FILES, META, Checkpoint, complete, flush, read, require, signed
from service.parallel.checkpoint.stored import ShardWriter, first_damaged, stored
from service.parallel.distributed import from_first_rank, rank_and_size


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
    working = _working_folder(folder, step)
    on_first_rank(lambda: _make_anew(working), f"make {working}", group)
    writer, target = ShardWriter(working), folder / f"step_{step}"
    try:
        with _no_group_meant(rank_and_size()[1] == 1):
            dcp_save(
                dict(state),
                storage_writer=writer,
                planner=_UnpaddedSavePlanner(rows or {}),
                process_group=group,
                no_dist=rank_and_size()[1] == 1,
            )
        on_first_rank(lambda: publish(folder, step, meta, keep, writer.digests), f"publish {target}", group)
    except BaseException:
        if rank_and_size()[0] == 0:
            _remove_unfinished(folder)
        raise
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
    with _no_group_meant(rank_and_size()[1] == 1):
        planner = _UnpaddedLoadPlanner(rows)
        dcp_load(dict(state), storage_reader=reader, planner=planner, no_dist=rank_and_size()[1] == 1)
    return checkpoint


def damage(found: Checkpoint) -> str | None:
    """Return the name of a file of the checkpoint that has changed since it was written; ``None`` if none has. All
    ranks call it together. Checkpoints from before there were digests count as whole.
    """
    digests = found.meta.get(DIGESTS, {})
    # Only the listed files, which are in the folder: a description may name any.
    return first_damaged(found.path, {name: digests[name] for name in found.meta[FILES] if name in digests})


def load_whole(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return the unsharded tensors whose names start with ``prefix`` (cut off), on the CPU; no collective.

    They may be mapped, and must not be written to.
    """
    return {name: tensor.whole() for name, tensor in stored(path, prefix).items()}


def on_first_rank(act: Callable[[], None], what: str, group: ProcessGroup | None = None) -> None:
    """Run ``act`` on the first rank while the others wait for it; all ranks of ``group`` call this together.

    An ``OSError`` of ``act`` is raised on the first rank, and a :class:`PublishError` that describes it on all
    others.
    """
    failed: OSError | None = None
    if rank_and_size()[0] == 0:
        try:
            act()
        except OSError as error:
            failed = error
    outcome = from_first_rank(None if failed is None else str(failed), group)
    if failed is not None:
        raise failed
    if outcome is not None:
        raise PublishError(f"rank 0 could not {what}: {outcome}")


def _make_anew(working: Path) -> None:
    _remove_unfinished(working.parent)
    working.mkdir(parents=True)


def _remove_unfinished(folder: Path) -> None:
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _check_fits(
    path: Path, reader: HuggingFaceStorageReader, state: Mapping[str, Tensor], rows: Mapping[str, int]
) -> None:
    """Raise before DCP's planner does, with a message that names the first tensor that does not fit."""
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
    """Silence DCP's warning about work in one process, which is meant here."""
    if not alone:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _UnpaddedSavePlanner(DefaultSavePlanner):
    """Plans to write each tensor without its padding: files hold the rows that every layout has.

    ``rows`` counts, for each tensor whose first dimension is padded at its end, the rows before that.
    """

    def __init__(self, rows: Mapping[str, int]) -> None:
        super().__init__()
        self._rows = rows

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = (self._without_padding(item) for item in plan.items)
        self.plan = replace(plan, items=[item for item in items if item is not None])
        return self.plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - the name of the base class
        found = super().transform_object(write_item, object)
        if write_item.index.fqn not in self._rows or write_item.tensor_data is None:
            return found
        assert isinstance(found, Tensor)
        return found[: write_item.tensor_data.chunk.sizes[0]]

    def _without_padding(self, item: WriteItem) -> WriteItem | None:
        """Return the item for the part of its chunk before the padding; ``None`` if that is empty."""
        rows, data = self._rows.get(item.index.fqn), item.tensor_data
        if rows is None or data is None:
            return item
        own = min(rows - data.chunk.offsets[0], data.chunk.sizes[0])
        if own <= 0:
            return None
        chunk = replace(data.chunk, sizes=torch.Size((own, *data.chunk.sizes[1:])))
        return replace(item, tensor_data=replace(data, chunk=chunk, size=torch.Size((rows, *data.size[1:]))))


class _UnpaddedLoadPlanner(DefaultLoadPlanner):
    """Leaves the padding of tensors as it is."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        super().__init__()
        self._rows = rows

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if metadata is not None:
            held = dict(metadata.state_dict_metadata)
            for name in self._rows.keys() & held.keys() & state_dict.keys():
                # As large as the tensor here, so that the base class takes both for one; no file has the rest.
                entry = held[name]
                assert isinstance(entry, TensorStorageMetadata)
                held[name] = replace(entry, size=state_dict[name].shape)
            metadata = replace(metadata, state_dict_metadata=held)
        super().set_up_planner(state_dict, metadata, is_coordinator)


_UNFINISHED = ".unfinished_"


def _working_folder(folder: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before it is published."""
    return folder / f"{_UNFINISHED}step_{step}"


def publish(folder: Path, step: int, meta: Mapping[str, Any], keep: int, digests: Mapping[str, str]) -> None:
    """Give the working folder of ``step`` its name, once all of it is on disk; keep only the ``keep`` newest.
    ``digests`` are those of its files.

    A step that is already published is left as it is.
    """
    working, target = _working_folder(folder, step), folder / f"step_{step}"
    if read(target) is None:
        _write_meta(working, {"step": step, **meta, DIGESTS: dict(digests)})
        shutil.rmtree(target, ignore_errors=True)  # an unreadable checkpoint
        working.rename(target)
        flush(folder)
    _prune(folder, keep)


def _write_meta(working: Path, meta: Mapping[str, Any]) -> None:
    files = sorted(path for path in working.iterdir() if path.is_file())
    for path in files:
        flush(path)
    sizes = {path.name: path.stat().st_size for path in files}
    (working / META).write_text(json.dumps(signed({**meta, FILES: sizes}), indent=2))
    flush(working / META)
    flush(working)


def discard(damaged: Checkpoint) -> None:
    """Take away the name of a checkpoint that is good for nothing; the next one that is written removes it."""
    damaged.path.rename(damaged.path.with_name(f"{_UNFINISHED}damaged_{damaged.path.name}"))


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints, and the leftovers of interrupted saves."""
    for checkpoint in complete(folder)[:-keep]:
        checkpoint.path.rename(folder / f"{_UNFINISHED}old_{checkpoint.path.name}")
    _remove_unfinished(folder)
