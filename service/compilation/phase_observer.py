"""Observes the rungs of one phase on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter

import torch

from service.compilation.host_fault import fault_of_program, raise_host_fault
from service.compilation.instruments.caches import empty_caches
from service.compilation.instruments.text import first_line
from service.compilation.program import Program
from service.compilation.ranks.group import Separable, any_rank, collective_attempt, gather
from service.compilation.run.baseline import Baseline, make_baseline
from service.compilation.run.built_program import build
from service.compilation.run.influence import without_influence
from service.compilation.run.observation import Observation, RungCase
from service.compilation.run.observe_rung import observe_rung
from service.compilation.run.run_plan import RunPlan
from service.jobs.spec.compile import Phase

_ERROR: Callable[[Observation], str] = attrgetter("error")


@dataclass(frozen=True)
class PhaseObserver:
    """A program in one phase, with the baseline of its rungs."""

    program: Program
    baseline: Baseline | None
    """``None`` if the program does not even run uncompiled."""
    problem: str = ""
    """Why it does not, on any rank: then none may enter the collectives of a run."""

    @staticmethod
    def of(program: Program, phase: Phase, plan: RunPlan) -> PhaseObserver:
        """Run the uncompiled program."""
        (baseline, _), problems = collective_attempt(lambda: _baseline(program, phase, plan), itemgetter(1))
        problem = next((each for each in problems if each), "")
        if baseline is None or problem:
            return PhaseObserver(program, None, problem)
        torch.cuda.empty_cache()  # what float64 took, other processes on the device may need
        return PhaseObserver(program, replace(baseline, unused=_unused(program, baseline)))

    def observe(self, case: RungCase, plan: RunPlan) -> Observation:
        """Return what is seen of a rung; a program that does not run uncompiled fails every one."""
        if self.baseline is None:
            return Observation(case, error=self.problem)
        program, baseline = self.program, self.baseline
        if problem := _local_problems(program, case):
            return Observation(case, error=problem)
        seen, problems = collective_attempt(lambda: observe_rung(program, case, baseline, plan), _ERROR)
        refused = next((each for each in problems if each), "")
        # Generated code may fail only because it had to draw like eager, which it does in no job.
        if not (refused and case.rung.generates_code and any_rank(baseline.draws_like_eager(case.rung))):
            return seen
        return collective_attempt(lambda: observe_rung(program, case, baseline, plan, refused), _ERROR)[0]


def _baseline(program: Program, phase: Phase, plan: RunPlan) -> tuple[Baseline | None, str]:
    """Return the baseline, or why there is none."""
    try:
        return make_baseline(program, phase, plan.iterations, any_rank, plan.tells), ""
    except Exception as error:
        return None, f"the uncompiled model does not run: {fault_of_program(error)}"


def _unused(program: Program, baseline: Baseline) -> frozenset[str]:
    """Return the parameters without a gradient that affect no loss; none if that cannot be found out."""
    missing = frozenset[str]().union(*gather(baseline.eager.missing))
    if not missing:
        return missing

    def search() -> tuple[frozenset[str], str]:
        try:
            with baseline.precision():
                return without_influence(program, baseline, missing, any_rank), ""
        except Exception as error:
            return frozenset(), fault_of_program(error)

    (found, _), problems = collective_attempt(search, itemgetter(1))
    return frozenset() if any(problems) else found


def _local_problems(program: Program, case: RungCase) -> str:
    """Return the faults of any rank when each ran its own modules compiled; empty if there are none.

    Nothing is tried for a program that every rank runs whole: a fault of the compiler then shows on all of them.
    """
    if case.rung.rehearses or not isinstance(program, Separable):
        return ""
    _, problems = collective_attempt(lambda: _local_problem(program, program, case), str)
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)


def _local_problem(program: Program, separable: Separable, case: RungCase) -> str:
    with empty_caches():
        try:
            built = build(program, case.phase, case.rung)
            separable.alone(built.parts, built.boundary, case.phase)
        except Exception as error:
            raise_host_fault(error)
            return f"{type(error).__name__}: {first_line(str(error))}"
    return ""
