"""Reports what a check does at any moment: the present run of each process, and the time until all have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.compilation.run.observation import RungCase
from service.jobs.runtime import Reporter

UNCOMPILED, COMPILED = 4, 3
"""The runs that are announced for a phase's uncompiled program, and for each rung."""
_SHOWN = 2


@dataclass
class _LaneRuns:
    total: int
    began: float
    begun: int = 0
    doing: str = ""

    @property
    def share(self) -> float:
        """Return the finished part; runs of the uncompiled program may be fewer or more than planned."""
        return min(max(self.begun - 1, 0) / self.total, 0.99)

    def left_s(self, now: float) -> float | None:
        return (now - self.began) * (1 - self.share) / self.share if self.share else None


@dataclass
class Activity:
    """The activity of all lanes of a check. A run of a lane ends when the next one begins."""

    report: Reporter
    rungs: int
    done: int = 0
    lanes: dict[int, _LaneRuns] = field(default_factory=dict)

    def begin(self, lane: int, cases: Sequence[RungCase]) -> None:
        """Plan the runs of a lane, which begins now."""
        phases = {case.phase for case in cases}
        self.lanes[lane] = _LaneRuns(UNCOMPILED * len(phases) + COMPILED * len(cases), time.monotonic())

    def hear(self, lane: int, doing: str) -> None:
        """Report that a lane begins a run."""
        if own := self.lanes.get(lane):
            own.begun, own.doing = own.begun + 1, doing
            self.publish()

    def end(self, lane: int) -> None:
        """Leave out a lane that has ended."""
        self.lanes.pop(lane, None)

    def publish(self, done: int | None = None) -> None:
        """Report the rungs that are ``done``, the present runs, and how long the slowest lane will take."""
        self.done = self.done if done is None else done
        now = time.monotonic()
        lanes = [each for each in self.lanes.values() if each.doing]
        known = [left for each in lanes if (left := each.left_s(now)) is not None]
        self.report.progress(
            self.done,
            self.rungs,
            "rungs",
            share=round(max(self.done / self.rungs, min((each.share for each in lanes), default=0.0)), 3) or None,
            phase=_joined([*dict.fromkeys(each.doing for each in lanes)]) or None,
            left_s=round(max(known), 1) if len(known) == len(lanes) and known and self.done < self.rungs else None,
        )


def _joined(runs: Sequence[str]) -> str:
    more = f"; and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    return "; ".join(runs[:_SHOWN]) + more
