"""Compares a rung's run with the baseline, and looks for causes of a difference that are no fault of the compiler.

Such causes are other random numbers of the same distribution, and numbers within rounding of a kink. The other way
round, results may agree by chance where stale memory holds the right numbers: the audit looks for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from service.compilation.host_fault import fault_of_program
from service.compilation.instruments.caches import forget_compiled
from service.compilation.instruments.switches import own_random_numbers
from service.compilation.monitor.usage import Usage
from service.compilation.program import Program
from service.compilation.run.audit import Audit, audit, unseen_in
from service.compilation.run.baseline import Baseline, draws_like
from service.compilation.run.built_program import BuiltProgram, build
from service.compilation.run.compare_runs import compare_runs
from service.compilation.run.distribution import SEEDS, Places, differs_in_distribution, furthest_off
from service.compilation.run.kinks import are_kinks, doubtful, drew_otherwise, jumps, own_limit
from service.compilation.run.notes import names_of
from service.compilation.run.observation import RungCase
from service.compilation.run.parity import Comparison
from service.compilation.run.recorded_run import TRAJECTORY, RecordedRun, Snapshot
from service.compilation.run.run_plan import RunPlan
from service.compilation.run.sampling import is_left_behind

_REDRAWN = "other random numbers, of the same distribution"
_KINK = "the other side of a kink"


@dataclass
class Assessment:
    """One rung's comparisons and findings; all ranks run the program again, or none: they meet in collectives."""

    program: Program
    case: RungCase
    baseline: Baseline
    plan: RunPlan
    refused: str = ""
    """The error that the rung raised when generated code had to draw like eager; empty if it did draw so."""
    comparisons: list[Comparison] = field(default_factory=list)
    redrawn: bool = False
    """Whether results differ only by other random numbers."""
    seeds: int = SEEDS
    """Over how many seeds distributions were compared."""
    kinks: tuple[Comparison, ...] = ()
    """Comparisons that only rounding at a kink decides."""
    audit: Audit = field(default_factory=Audit)

    def assess(
        self,
        built: BuiltProgram,
        run: RecordedRun,
        follow: Callable[[BuiltProgram, Sequence[Snapshot]], tuple[RecordedRun, Usage]],
    ) -> None:
        """Compare ``run`` of the compiled program, and run that again if this is not conclusive.

        ``follow`` runs and watches a compiled program, each iteration from one of the states.
        """
        self.comparisons = list(compare_runs(run, self.baseline, self.plan.tolerance))
        self._excuse_draws(built, run)
        self._excuse_kinks(run)
        self._audit(built, follow)

    @property
    def own_limit(self) -> str:
        """Return the known limit of this rung alone that explains all wrong results; empty if there is none."""
        return own_limit(self.case.rung, self.baseline, self.comparisons)

    def _excuse_draws(self, built: BuiltProgram, run: RecordedRun) -> None:
        """Excuse results that differ only by other random numbers of the same distribution.

        Without decompositions a rung draws like eager, unless it leaves the generator in another state: a compiled
        program may take another path, such as another kernel of attention. A known limit of the rung is no such case,
        nor is another shape or type, nor is what a step leaves behind where all that it comes from is right.
        """
        wrong = [each for each in self.comparisons if not each.passed]
        otherwise = self.case.rung.decomposes or (not self.own_limit and drew_otherwise(run, self.baseline))
        steps = [each.kind for each in wrong if each.iteration <= self.baseline.iterations and each.kind != TRAJECTORY]
        only_left = bool(steps) and all(map(is_left_behind, steps))
        never = only_left or any(each.stale_by or each.is_unlike for each in wrong)
        may = otherwise and self.baseline.eager.random and not never
        if self.plan.agree(float(may and bool(wrong))):
            places = furthest_off(wrong, run, self.baseline)
            self.redrawn = not self._differing_draws(built, places) and may and bool(wrong)
        if self.redrawn:
            self._excuse(_REDRAWN)

    def _excuse_kinks(self, run: RecordedRun) -> None:
        """Excuse gradients that rounding decides in eager too."""
        found = doubtful(self.comparisons, self.baseline.iterations)
        if not self.plan.agree(float(bool(found))):
            return
        most = jumps(self.program, self.case.phase, self.baseline)
        if are_kinks(found, run, self.baseline, most):
            self.kinks = found
            self._excuse(_KINK)

    def _excuse(self, why: str) -> None:
        """Let every comparison that failed pass, for this reason."""
        self.comparisons = [
            each if each.passed else replace(each, excess=0.0, is_noisy=False, note=why) for each in self.comparisons
        ]

    def draws_of_job(self) -> str:
        """Return the result whose distribution differs from eager's when generated code draws as in a job."""
        drawn = self.case.rung.generates_code and self.plan.agree(float(self.baseline.eager.random))
        if self.refused or not drawn:
            return ""  # it was compared with such draws
        with own_random_numbers():
            forget_compiled()
            return self._differing_draws(build(self.program, self.case.phase, self.case.rung), {})

    def _differing_draws(self, built: BuiltProgram, places: Places) -> str:
        settings = self.baseline, self.plan.tolerance, self.plan.agree
        differs, self.seeds = differs_in_distribution(built, *settings, places)
        return differs

    def _audit(
        self, built: BuiltProgram, follow: Callable[[BuiltProgram, Sequence[Snapshot]], tuple[RecordedRun, Usage]]
    ) -> None:
        """Find out whether stale memory is read, if parity could not see it."""
        unseen = unseen_in(self.baseline, self.program.period) if self.case.rung.overwrites else ()
        if not all(each.passed for each in self.comparisons):
            unseen = ()  # something was found
        if not self.plan.agree(float(bool(unseen))):
            return
        try:
            self.audit = audit(unseen, built.restarted(), follow, self.baseline, self.plan.tolerance)
        except Exception as error:
            problem = f"with shuffled parameters {fault_of_program(error)}"
            self.audit = Audit(tuple(map(" ".join, unseen)), problem=problem)

    def notes_on_draws(self) -> Iterator[str]:
        """Yield how the rung drew random numbers while it was compared."""
        if self.refused:
            yield f"with fallback_random, which no job has, it ends with {self.refused}"
        elif draws_like(self.baseline.eager, self.case.rung):
            yield "ran with fallback_random: a job's own draws will differ from eager's"

    def notes(self) -> Iterator[str]:
        """Yield what was excused, and why."""
        if self.redrawn:
            yield "draws other random numbers than eager, of the same distribution over seeds"
        if self.seeds < SEEDS:
            yield f"distributions were compared over {self.seeds} seeds instead of {SEEDS}: a step takes too long"
        if self.kinks:
            names = names_of(sorted({each.name for each in self.kinks}))
            yield f"rounding decides on which side of a kink, as of a relu, in eager too: {names}"
        if self.audit.unseen and not (self.audit.read or self.audit.problem):
            same = f"a stale value would be the right one of {names_of(self.audit.unseen)}, the same in every iteration"
            yield f"{same}: with shuffled parameters, or for want of anything held over a replay, none is read"
