"""Climbs the ladder: each rung only after the previous one passed, in every phase and on every rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace

from service.compilation.judgement import Result, judge_rehearsal, judge_rung
from service.compilation.phase_observer import PhaseObserver
from service.compilation.program import Program
from service.compilation.ranks.group import GroupLostError
from service.compilation.run.observation import RungCase
from service.compilation.run.run_plan import RunPlan
from service.compilation.rungs import REHEARSAL, Rung
from service.compilation.verdicts import Finding
from service.jobs.spec.compile import Phase
from service.parallel.distributed import gather

GOES_ON = frozenset({"pass", "not_applicable", "timeout"})
"""The verdicts after which the next rung is tried."""


def climb(
    program: Program,
    rungs: Sequence[Rung],
    phases: Sequence[Phase],
    plan: RunPlan,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    begins: Callable[[RungCase], None] = lambda case: None,
) -> Iterator[Result]:
    """Yield the results, one for each rung and phase, as they come; phase by phase, from the foot of the ladder.

    Between rungs every rank asks ``should_stop``; the remaining rungs are then ``not_reached``. ``begins`` is called
    with each rung that is tried, once the uncompiled program has run.
    """
    lost, left = "", len(rungs) * len(phases)
    for phase in phases:
        cases = [(left - climbed, RungCase(rung, phase)) for climbed, rung in enumerate(rungs)]
        lost = yield from _climb_phase(program, cases, plan, should_stop, lost, begins=begins)
        left -= len(rungs)


def _climb_phase(
    program: Program,
    cases: Sequence[tuple[int, RungCase]],
    plan: RunPlan,
    should_stop: Callable[[], bool],
    lost: str,
    *,
    begins: Callable[[RungCase], None],
) -> Generator[Result, None, str]:
    """Yield the results of a phase, whose ``cases`` come with the number of rungs that are left. ``lost`` says why the
    other ranks are gone, empty while they are there; return its new value.
    """
    observer, blocked = None, lost
    for left, case in cases:
        if not blocked and any(gather(should_stop())):
            blocked = "the job was asked to stop"
        if blocked:
            yield Result(case, "not_reached", (Finding("not_reached", blocked),))
            continue
        try:
            observer = observer or PhaseObserver.of(program, case.phase, plan)
            begins(case)
            result = _climb_rung(observer, case, replace(plan, limit_s=plan.share.seconds(left)))
        except GroupLostError as error:
            lost = f"the ranks lost each other at {case.rung.name} of {case.phase}"
            result = Result(case, "fail_error", error.findings)
        if result.verdict not in GOES_ON:
            blocked = lost or f"{case.rung.name} did not pass ({result.verdict})"
        yield result
    return lost


def _climb_rung(observer: PhaseObserver, case: RungCase, plan: RunPlan) -> Result:
    """Observe and judge a rung; where CUDA graphs do not apply, their rehearsal."""
    rehearses = case.rung.cuda_graphs and observer.program.device.type != "cuda"
    seen = observer.observe(RungCase(REHEARSAL, case.phase) if rehearses else case, plan)
    return judge_rehearsal(seen, case, observer.program) if rehearses else judge_rung(seen)
