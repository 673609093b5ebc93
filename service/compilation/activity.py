"""Reports what a check does at any moment: the present run of each process, the time until all have ended, and each
result as it comes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from service.compilation.climber_process import Climbed
from service.compilation.judgement import Result
from service.compilation.report.rows import metrics
from service.compilation.run.observation import RungCase
from service.jobs.runtime import Reporter

UNCOMPILED, COMPILED = 4, 4
"""The runs that are announced for a phase's uncompiled program, and for each rung; one that generates code starts
again from a filled cache.
"""
_SHOWN = 2
"""The most processes whose present run is told."""


@dataclass
class _ProcessRuns:
    """The runs of one process: how many are planned, and which have begun."""

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
    """The activity of all processes of a check. A run of a process ends when its next one begins."""

    report: Reporter
    rungs: int
    done: int = 0
    processes: dict[int, _ProcessRuns] = field(default_factory=dict)

    def begin(self, process: int, cases: Sequence[RungCase]) -> None:
        """Plan the runs of a process, which begins now."""
        phases = {case.phase for case in cases}
        again = sum(case.rung.generates_code for case in cases)
        total = UNCOMPILED * len(phases) + COMPILED * len(cases) + again
        self.processes[process] = _ProcessRuns(total, time.monotonic())

    def hear(self, process: int, doing: str) -> None:
        """Report that a process begins a run."""
        if own := self.processes.get(process):
            own.begun, own.doing = own.begun + 1, doing
            self.publish()

    def end(self, process: int) -> None:
        """Leave out a process that has ended."""
        self.processes.pop(process, None)

    def publish(self, done: int | None = None) -> None:
        """Report the rungs that are ``done``, the present runs, and how long the slowest process will take."""
        self.done = self.done if done is None else done
        now = time.monotonic()
        busy = [each for each in self.processes.values() if each.doing]
        known = [left for each in busy if (left := each.left_s(now)) is not None]
        self.report.progress(
            self.done,
            self.rungs,
            "rungs",
            share=round(max(self.done / self.rungs, min((each.share for each in busy), default=0.0)), 3) or None,
            phase=_first_few([*dict.fromkeys(each.doing for each in busy)]) or None,
            left_s=round(max(known), 1) if len(known) == len(busy) and known and self.done < self.rungs else None,
        )

    def report_results(self, climbed: Iterator[Climbed]) -> Iterator[Result]:
        """Yield the results of all rungs, and report each as it comes."""
        self.publish(0)
        for done, each in enumerate(climbed, start=1):
            self._report_result(each, done)
            self.publish(done)
            yield each.result

    def _report_result(self, climbed: Climbed, done: int) -> None:
        result = climbed.result
        name = result.case.name
        started, ended = climbed.ran or (time.time(),) * 2
        self.report.span(name, started, ended, {"verdict": result.verdict, "runs": climbed.runs})
        if result.observation is not None:
            self.report.log(f"{name}: {result.verdict.replace('_', ' ')} after {ended - started:.0f} s")
        self.report.metric(done, metrics(result))
        for finding in result.findings:
            self.report.log(f"{name}: {finding.verdict}: {finding.message}")
        for line in climbed.stacks.splitlines():
            self.report.log(line)


def _first_few(runs: Sequence[str]) -> str:
    more = f"; and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    return "; ".join(runs[:_SHOWN]) + more
