"""Decides when a checkpoint is written: at once, or in the background while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from service.jobs.files import Checkpoint
from service.parallel.checkpoint.storage import save
from service.parallel.distributed import rank_and_size
from service.parallel.tensor.placement import local

LAST_WRITE_S = 10.0
"""How long an error of the job waits for a running write: peers must not learn of it too late."""

Tell = Callable[[Checkpoint], None]
"""Is told of each checkpoint that is complete on disk, in the thread that wrote it."""


class CheckpointError(RuntimeError):
    """A checkpoint that was being written in the background could not be finished."""


class Saver(Protocol):
    """Publishes checkpoints of one job; every rank makes the same calls. Leave the context before the group ends.

    Savers are made with ``rows``, see :func:`service.parallel.checkpoint.save`, and with whom to tell (:data:`Tell`).
    """

    def expect(self, state: Mapping[str, Tensor]) -> None:
        """Get ready for a state like this; training need not wait."""

    def save(self, step: int, state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take the tensors as they are now; they may change when this returns."""

    @property
    def has_failed(self) -> bool:
        """Return whether a write has failed on this rank; the ranks agree on it before any of them raises."""

    def wait(self) -> None:
        """Return when all checkpoints taken are published; raises :class:`CheckpointError` if a write failed."""

    def __enter__(self) -> Saver:
        """Return the saver itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what is being written; after an error only for a little."""


class DirectSaver:
    """Writes before it returns: no copy is kept."""

    def __init__(
        self, folder: Path, keep: int, rows: Mapping[str, int] | None = None, tell: Tell = lambda written: None
    ) -> None:
        self._folder, self._keep, self._rows, self._tell = folder, keep, rows, tell

    def expect(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing: no copy is kept."""

    def save(self, step: int, state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self._tell(save(self._folder, step, state, meta, self._keep, rows=self._rows))

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

    def __init__(
        self, folder: Path, keep: int, rows: Mapping[str, int] | None = None, tell: Tell = lambda written: None
    ) -> None:
        self._folder, self._keep, self._rows, self._tell = folder, keep, rows, tell
        self._staging = _Staging()
        self._group = dist.new_group(backend="gloo") if rank_and_size()[1] > 1 else None
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
        """Close; after an error elsewhere, a running write still gets a little time to become a checkpoint."""
        if kind is None:
            self.wait()
        elif self._writing is not None:
            self._writing.join(LAST_WRITE_S)

    def _write(self, step: int, staged: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        try:
            self._tell(save(self._folder, step, staged, meta, self._keep, rows=self._rows, group=self._group))
        except BaseException as error:
            self._failed = error


class _Staging:
    """Memory of the CPU for one copy of a state, taken once.

    Memory that has never been written to is what makes a first copy slow (0.5 s per GiB against 0.06, on one host),
    so it is written to ahead of that, in a thread. Pinned memory would be twice as fast to copy to, takes
    0.3 s per GiB to get, and torch rounds it up to powers of two.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._preparing: threading.Thread | None = None

    def prepare(self, state: Mapping[str, Tensor]) -> None:
        """Begin to take the memory that a copy of ``state`` will need."""
        kinds = {name: (local(each.detach()).shape, each.dtype) for name, each in state.items()}
        self._preparing = threading.Thread(target=self._take, args=(kinds,), name="checkpoint-memory", daemon=True)
        self._preparing.start()

    def copy(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``state`` as it is now, on the CPU, until the next call; DTensors stay DTensors."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        return {name: self._copied(name, tensor) for name, tensor in state.items()}

    def _take(self, kinds: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        for name, (shape, dtype) in kinds.items():
            self._buffers[name] = torch.empty(shape, dtype=dtype, device="cpu").zero_()

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        own = local(tensor.detach())
        if name not in self._buffers:
            self._buffers[name] = torch.empty(own.shape, dtype=own.dtype, device="cpu")
        buffer = self._buffers[name].copy_(own)
        if not isinstance(tensor, DTensor):
            return buffer
        # from_local() would move the copy to the mesh's device; tracing takes DTensors apart like this.
        names, layout = tensor.__tensor_flatten__()  # type: ignore[no-untyped-call]
        parts = {part: getattr(tensor, part) for part in names} | {"_local_tensor": buffer}
        copied: Tensor = DTensor.__tensor_unflatten__(parts, layout, tensor.shape, tensor.stride())  # type: ignore[no-untyped-call]
        return copied
