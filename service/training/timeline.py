"""Measures when a rank's device computed in a pipeline run: the measured counterpart of a schedule's prediction."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from service.schedules.schedule import Instruction, Schedule

Mark = TypeVar("Mark")


@dataclass(frozen=True)
class Load:
    """Holds the seconds in which a rank's device computed, out of those from its first to its last computation
    in a run.
    """

    busy: float
    window: float


NO_LOAD = Load(0.0, 0.0)


class _DeviceClock(Protocol[Mark]):
    """Marks moments of the device's work, and reads their times once the device has passed them."""

    def mark(self) -> Mark:
        """Mark this moment of the work."""

    def has_passed(self, mark: Mark) -> bool:
        """Return whether the device has passed the mark."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the time between two marks that were passed."""

    def epoch(self, mark: Mark) -> float:
        """Return the Unix time of a mark."""


class HostClock:
    """Takes times on the host, which does the work itself. They are monotonic, and are converted to epoch times when
    read.
    """

    def mark(self) -> float:
        return time.perf_counter()

    def has_passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def epoch(self, mark: float) -> float:
        return time.time() - (time.perf_counter() - mark)


class _CudaClock:
    """Records events on the computing stream: they are free, and only :meth:`epoch` waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def epoch(self, mark: torch.cuda.Event) -> float:
        now = self.mark()
        now.synchronize()
        return time.time() - self.seconds(mark, now)


@dataclass
class _Recording(Generic[Mark]):
    start: Mark
    end: Mark | None = None
    computations: list[tuple[Instruction, Mark, Mark]] = field(default_factory=list)


class Timeline(Generic[Mark]):
    """An observer of a pipeline's training runs that keeps the last two; evaluations go unrecorded."""

    def __init__(self, clock: _DeviceClock[Mark]) -> None:
        self.clock = clock
        self._current: _Recording[Mark] | None = None
        self._finished: deque[_Recording[Mark]] = deque(maxlen=2)

    def run(self, schedule: Schedule) -> AbstractContextManager[None]:
        return self._record() if schedule.trains else nullcontext()

    @contextmanager
    def _record(self) -> Iterator[None]:
        self._current = _Recording(self.clock.mark())
        yield
        self._current.end = self.clock.mark()
        self._finished.append(self._current)
        self._current = None

    @contextmanager
    def computing(self, instruction: Instruction) -> Iterator[None]:
        if self._current is None:
            yield
            return
        start = self.clock.mark()
        yield
        self._current.computations.append((instruction, start, self.clock.mark()))

    def load(self) -> Load:
        """Return the load of the newest run that the device has finished; on CUDA, without waiting, the one before."""
        for recording in reversed(self._finished):
            if recording.end is not None and self.clock.has_passed(recording.end):
                busy = sum(self.clock.seconds(start, end) for _, start, end in recording.computations)
                return Load(busy, self.clock.seconds(recording.start, recording.end))
        return NO_LOAD

    def spans(self, step: int) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
        """Yield the computations of the newest run, that of ``step``, which has ended; waits for the device.

        Each is its name, its start and its end in seconds of the epoch, and ``{step, stage, micro_batch, op}``.
        """
        if not self._finished:
            return
        recording = self._finished[-1]
        began = self.clock.epoch(recording.start)
        for instruction, start, end in recording.computations:
            detail = {
                "step": step,
                "stage": instruction.stage,
                "micro_batch": instruction.micro_batch,
                "op": str(instruction.op),
            }
            first, last = (began + self.clock.seconds(recording.start, mark) for mark in (start, end))
            yield str(instruction.op), first, last, detail


def timeline(device: torch.device) -> Timeline[Any]:
    """Return the timeline of a pipeline on ``device``."""
    return Timeline[Any](_CudaClock(device) if device.type == "cuda" else HostClock())


def bubble_fraction(busy: float, ranks: int, window: float) -> float:
    """Return the share of a run in which a device computed nothing, averaged over ``ranks`` that were ``busy`` seconds
    together.

    A run lasts ``window`` seconds, as long as the slowest rank takes; all begin it together, at the end of the previous
    step. Waiting for a neighbour's data and transfers count as idle, launch gaps within a computation do not.
    """
    return max(0.0, 1 - busy / (ranks * window))
