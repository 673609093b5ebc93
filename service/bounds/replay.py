"""A repeated iteration: on a CUDA device it is recorded once and replayed, so that its launches cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, ValuesView
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch

from service.garbage import uncollected

Key = TypeVar("Key")
Value = TypeVar("Value")


class Repeat(Protocol):
    def run(self, body: Callable[[], None], times: int) -> None:
        """Run the body, which is the same at each call."""


@dataclass(eq=False)
class Memory:
    """The memory of records that never run at once and share only tensors from elsewhere.

    ``bytes`` were reserved for it: torch counts them as free while they are empty, but they are not available. A pool
    ends with the last record in it, and may not be named again: ``anchor`` is a record that stays.
    """

    bytes: int = 0
    _anchor: torch.cuda.CUDAGraph | None = None

    def pool(self, device: torch.device) -> Any:
        """Return the records' pool on a CUDA device, as ``capture_begin`` takes it; called on the recording stream."""
        if self._anchor is None:
            self._anchor = torch.cuda.CUDAGraph()
            self._anchor.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=device)
            self._anchor.capture_end()
        return self._anchor.pool()


@dataclass(eq=False)
class RecordCache(Generic[Key, Value]):
    """Keeps recordings of bodies by key: all of them in one memory, and no more than ``most``; the least recently
    used one makes room.

    ``repeat`` makes the repeater of a body in some memory. A value is taken out while it is used, and is dropped if
    its use fails.
    """

    repeat: Callable[[Memory], Repeat]
    most: int
    memory: Memory = field(default_factory=Memory)
    _kept: dict[Key, Value] = field(default_factory=dict)

    def repeater(self) -> Repeat:
        """Return a repeater of another body in the memory of this cache."""
        return self.repeat(self.memory)

    def take(self, key: Key) -> Value | None:
        """Return the value without keeping it, if there is one."""
        return self._kept.pop(key, None)

    def keep(self, key: Key, value: Value) -> None:
        """Keep a value as the most recently used one."""
        while len(self._kept) >= self.most:
            self.drop_oldest()
        self._kept[key] = value

    def drop_oldest(self) -> Key:
        """Drop the least recently used value, and return its key."""
        oldest = next(iter(self._kept))
        del self._kept[oldest]
        return oldest

    def renew_memory(self) -> None:
        """Give further records a memory of their own: this one is freed with the last record in it."""
        self.memory = Memory()

    def clear(self) -> None:
        """Drop all values, and so all records."""
        self._kept.clear()
        self.renew_memory()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Key]:
        """Yield the keys, the least recently used one first."""
        return iter(self._kept)

    def values(self) -> ValuesView[Value]:
        return self._kept.values()


class Plain:
    """Runs a body as often as asked."""

    def run(self, body: Callable[[], None], times: int) -> None:
        for _ in range(times):
            body()


class Recorded:
    """A body that takes nothing, returns nothing, and works on tensors that stay in place.

    For a CUDA device. The first run is not recorded, since in it libraries make their plans and the body its tensors;
    the second is recorded; the rest replay the record. Kernels are the same, and so are results. The body is given
    anew at each call, and must be the same one: to keep it here would keep its owner, and so the record, alive until
    the next garbage collection.
    """

    def __init__(self, device: torch.device, memory: Memory | None = None) -> None:
        self.device, self.memory = device, Memory() if memory is None else memory
        self.record: torch.cuda.CUDAGraph | None = None

    def run(self, body: Callable[[], None], times: int) -> None:
        done = 0
        if self.record is None:
            done = min(times, WARM)
            self._warm(body, done)
            if times > done:
                self.record = self._record(body)
        if self.record is not None:
            for _ in range(times - done):
                self.record.replay()

    def _warm(self, body: Callable[[], None], times: int) -> None:
        """Run on a stream of its own: the default stream cannot be recorded."""
        stream = _recording_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(times):
                body()
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def _record(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream, record = _recording_stream(self.device), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_reserved(self.device)
        with torch.cuda.stream(stream), uncollected():  # the collector may free another record, which would spoil this
            record.capture_begin(self.memory.pool(self.device), capture_error_mode="thread_local")
            try:
                body()
            except BaseException:
                with suppress(RuntimeError):  # an invalid record, which would hide the cause
                    record.capture_end()
                raise
            record.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.memory.bytes += max(0, torch.cuda.memory_reserved(self.device) - before)
        return record


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for each device: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


WARM = 1
