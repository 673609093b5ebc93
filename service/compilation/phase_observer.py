"""Observes the rungs of one phase on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter

import torch

from service.compilation.host_fault import fault_of_program, raise_host_fault
from service.compilation.instruments.caches import empty_caches
from service.compilation.instruments.text import first_line
from service.compilation.program import Program
from service.compilation.ranks.group import Separable, any_rank, collective_attempt
from service.compilation.run.baseline import (
    AwaitedBaseline,
    Baseline,
    Reference,
    UncompiledError,
    UncompiledRuns,
    draws_like,
    make_baseline,
)
from service.compilation.run.built_program import build
from service.compilation.run.exchange import Exchange
from service.compilation.run.influence import without_influence
from service.compilation.run.observation import Observation, RungCase
from service.compilation.run.observe_rung import observe_rung
from service.compilation.run.run_plan import RunPlan
from service.compilation.run.shared_runs import SharedRuns
from service.jobs.spec.compile import Phase
from service.parallel.distributed import gather

_ERROR: Callable[[Observation], str] = attrgetter("error")


@dataclass(frozen=True)
class PhaseObserver:
    """A program in one phase, with the baseline of its rungs."""

    program: Program
    reference: Reference | None
    """``None`` if the program does not even run uncompiled."""
    problem: str = ""
    """Why it does not, on any rank: then none may enter the collectives of a run."""

    @staticmethod
    def of(program: Program, phase: Phase, plan: RunPlan) -> PhaseObserver:
        """Run the uncompiled program, or take what another process found when it ran it."""
        if plan.exchange is not None:
            return PhaseObserver._beside_others(program, phase, plan, plan.exchange)
        (baseline, _), problems = collective_attempt(lambda: _baseline(program, phase, plan), itemgetter(1))
        problem = next((each for each in problems if each), "")
        if baseline is None or problem:
            return PhaseObserver(program, None, problem)
        return PhaseObserver(program, _examined(program, baseline))

    @staticmethod
    def _beside_others(program: Program, phase: Phase, plan: RunPlan, exchange: Exchange) -> PhaseObserver:
        """Begin as soon as the first run is known, unless that may not be the one that counts: the process that made
        it makes the rest at once.
        """
        runs = UncompiledRuns(program, phase, plan.iterations, any_rank, plan.tells, plan.each_makes_states)
        try:
            with _described():
                shared = SharedRuns.begin(runs, exchange, defers=plan.defers)
            awaited = AwaitedBaseline(shared.first, lambda: _examined(program, _completed(shared)))
            reference = awaited.completed() if shared.waits else awaited
        except UncompiledError as error:
            return PhaseObserver(program, None, str(error))
        return PhaseObserver(program, reference)

    def observe(self, case: RungCase, plan: RunPlan) -> Observation:
        """Return what is seen of a rung; a program that does not run uncompiled fails every one."""
        if self.reference is None:
            return Observation(case, error=self.problem)
        program, reference = self.program, self.reference
        if problem := _local_problems(program, case):
            return Observation(case, error=problem)
        seen, problems = collective_attempt(lambda: observe_rung(program, case, reference, plan), _ERROR)
        awaited = bool(seen.comparisons) and isinstance(reference, AwaitedBaseline)
        if awaited and reference.completed().hidden_by_tf32:  # what a later step calls
            return replace(self, reference=reference.completed()).observe(case, plan)
        refused = next((each for each in problems if each), "")
        # Generated code may fail only because it had to draw like eager, which it does in no job.
        if not (refused and case.rung.generates_code and any_rank(draws_like(reference.eager, case.rung))):
            return seen
        return collective_attempt(lambda: observe_rung(program, case, reference, plan, refused), _ERROR)[0]


def _baseline(program: Program, phase: Phase, plan: RunPlan) -> tuple[Baseline | None, str]:
    """Return the baseline, or why there is none."""
    try:
        with _described():
            return make_baseline(program, phase, plan.iterations, any_rank, plan.tells), ""
    except UncompiledError as error:
        return None, str(error)


@contextmanager
def _described() -> Iterator[None]:
    """Raise :class:`UncompiledError` for an error of the uncompiled program, unless it is the host's fault."""
    try:
        yield
    except Exception as error:
        raise UncompiledError(f"the uncompiled model does not run: {fault_of_program(error)}") from error


def _completed(shared: SharedRuns) -> Baseline:
    with _described():
        return shared.complete()


def _examined(program: Program, baseline: Baseline) -> Baseline:
    """Return the baseline with what is found out by further runs."""
    torch.cuda.empty_cache()  # what float64 took, other processes on the device may need
    return replace(baseline, unused=_unused(program, baseline))


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
