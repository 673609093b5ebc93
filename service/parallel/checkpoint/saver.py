"""Decides when a checkpoint is written: at once, or in the background while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from service.parallel.checkpoint.staging import Staging
from service.parallel.checkpoint.storage import save

LAST_WRITE_S = 10.0
"""How long an error of the job waits for a write that is under way: peers must not learn of it too late."""


class CheckpointError(RuntimeError):
    """A checkpoint that was being written in the background could not be finished."""


class Saver(Protocol):
    """Publishes checkpoints of one job; every rank makes the same calls. Leave the context before the group ends.

    Savers are made with ``rows``, see :func:`service.parallel.checkpoint.save`.
    """

    def expect(self, state: Mapping[str, Tensor]) -> None:
        """Get ready for a state like this; training need not wait."""

    def save(self, step: int, state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take the tensors as they are now; they may change when this returns."""

    @property
    def has_failed(self) -> bool:
        """Return whether a write has failed on this rank; the ranks agree on it before any of them raises."""

    def wait(self) -> None:
        """Return when everything that was taken is published; raises :class:`CheckpointError` where a write failed."""

    def __enter__(self) -> Saver: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class DirectSaver:
    """Writes before it returns: no copy is kept."""

    def __init__(self, folder: Path, keep: int, rows: Mapping[str, int] | None = None) -> None:
        self._folder, self._keep, self._rows = folder, keep, rows

    def expect(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing: no copy is kept."""

    def save(self, step: int, state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        save(self._folder, step, state, meta, self._keep, rows=self._rows)

    @property
    def has_failed(self) -> bool:
        return False

    def wait(self) -> None:
        """Do nothing: no write is ever under way."""

    def __enter__(self) -> DirectSaver:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class BackgroundSaver:
    """Copies to the CPU and returns; a thread writes and publishes. At most one write is under way.

    The thread's collectives have a gloo group of their own, so they can't meet those of training in another order
    on another rank.
    """

    def __init__(self, folder: Path, keep: int, rows: Mapping[str, int] | None = None) -> None:
        self._folder, self._keep, self._rows = folder, keep, rows
        self._staging = Staging()
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._writing: threading.Thread | None = None
        self._failed: BaseException | None = None

    def expect(self, state: Mapping[str, Tensor]) -> None:
        self._staging.prepare(state)

    def save(self, step: int, state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self.wait()
        staged = self._staging.copy(state)
        # A daemon: a rank that fails leaves at once, even if its peers, whom a write waits for, are gone.
        self._writing = threading.Thread(
            target=self._write, args=(step, staged, dict(meta)), name=f"checkpoint-{step}", daemon=True
        )
        self._writing.start()

    @property
    def has_failed(self) -> bool:
        return self._failed is not None

    def _check(self) -> None:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise CheckpointError(f"{failed} (while a checkpoint was written in the background)") from failed

    def wait(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        self._check()

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an error elsewhere, what is under way still gets a little time to become a checkpoint."""
        if kind is None:
            self.wait()
        elif self._writing is not None:
            self._writing.join(LAST_WRITE_S)

    def _write(self, step: int, staged: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        try:
            save(self._folder, step, staged, meta, self._keep, rows=self._rows, group=self._group)
        except BaseException as error:
            self._failed = error
