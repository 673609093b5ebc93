"""Reports the progress of a verification job, its remaining time, and its use of time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

import torch

from service.jobs.runtime import Reporter

QUIET_S = 3.0
"""A batch that takes less time reports only its end."""
EVERY_S = 1.0


@dataclass(eq=False)
class JobProgress:
    """Reports progress in instances, and within a batch of them; a group's decisions count ``groups`` times.

    This rank's stage works between the shares ``first`` and ``last`` of an analysis: stages bound their layers
    one after the other, and rows of later stages go back through all earlier ones.
    """

    report: Reporter
    total: int
    groups: int = 1
    first: float = 0.0
    last: float = 1.0
    now: Callable[[], float] = time.monotonic
    done: int = 0
    _began: float = field(init=False)
    _share: float = 0.0
    """The start of this attempt, and the work that earlier ones had done by then."""
    _batch_began: float = field(init=False)
    _told: float = -inf

    def __post_init__(self) -> None:
        self._began = self._batch_began = self.now()

    @classmethod
    def of_stage(cls, report: Reporter, total: int, groups: int, stage: int, stages: int) -> JobProgress:
        """Return the progress of a model in one stage, or of stage number ``stage`` of several."""
        return cls(report, total, groups, (stage / stages) ** 2, ((stage + 1) / stages) ** 2)

    def resume(self, decided: int) -> None:
        """Begin with the instances that an earlier attempt decided."""
        self._share = self._of_all(decided)
        self.decide(decided)

    def decide(self, more: int) -> None:
        """Count decided instances; of several stages, which decide the same ones, the first reports."""
        self.done += more
        if more and self.first == 0:
            self._report()

    def begin_batch(self) -> None:
        self._batch_began = self.now()

    def analyse(self, size: int, share: float) -> None:
        """Report that ``share`` of this stage's part of the analysis of ``size`` instances is done."""
        now = self.now()
        if now - self._batch_began < QUIET_S or now - self._told < EVERY_S:
            return
        self._told = now
        within = self.first + (self.last - self.first) * share
        whole = self._of_all(self.done + size * within)
        gained = whole - self._share
        left_s = (now - self._began) * (1 - whole) / gained if gained > 0 else None
        self._report(share=whole, phase="bounding", left_s=left_s)

    def _of_all(self, decided: float) -> float:
        return min(decided * self.groups / max(self.total, 1), 1.0)

    def _report(self, share: float | None = None, phase: str | None = None, left_s: float | None = None) -> None:
        done = min(self.done * self.groups, self.total)
        self.report.progress(done, self.total, "instances", share=share, phase=phase, left_s=left_s)


PHASES = ("prepare", "witnesses", "layers", "outputs", "attack", "search", "replays")
"""The phases: preparing the model; evaluating witnesses; bounding hidden layers; bounding outputs and the
property's rows; attacking; searching the rest; checking what was verified. The root of a search, which is bounded
again, counts as search."""


@dataclass(eq=False)
class PhaseTimes:
    """Seconds by phase on this rank: a phase ends when the device has done its work."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds[name] += time.monotonic() - started
