"""Reduces a failed rung to the smallest module that fails, and a script that shows it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from service.compilation.diagnosis.check import difference
from service.compilation.diagnosis.graphs import Captured, UnsuitableError, capture, minimise
from service.compilation.diagnosis.script import bisect, write
from service.compilation.diagnosis.script import run as run_script
from service.compilation.host_fault import describe
from service.compilation.instruments.caches import empty_caches
from service.compilation.instruments.trace import traced
from service.compilation.judgement import Result
from service.compilation.program import Program
from service.compilation.ranks.group import GroupLostError, Separable, any_rank, collective_attempt
from service.compilation.run.baseline import Baseline, make_baseline, random_numbers
from service.compilation.run.built_program import build, build_only
from service.compilation.run.compare_runs import compare_runs
from service.compilation.run.observation import RungCase
from service.compilation.run.recorded_run import record_run
from service.compilation.run.run_plan import RunPlan
from service.compilation.rungs import Rung
from service.jobs.runtime import RunContext, Stopwatch
from service.jobs.spec.compile import Tolerance
from service.models.compiled import as_compiled
from service.parallel.distributed import gather, rank_and_size

log = logging.getLogger(__name__)
SEARCH_S = 30.0
"""Seconds for the search. Its script then has time of its own to show the fault, which does not depend on the load."""
_ISOLATED = ("fail_error", "fail_parity")
"""Verdicts that a single module can cause."""


@dataclass(frozen=True)
class Reproduction:
    """A script that shows a fault, if there is one."""

    script: str = ""
    """The artifact; empty if there is none."""
    operators: int = 0
    """How many operators it has."""
    confirmed: bool | None = None
    """Whether it showed the fault in a process of its own; ``None`` if that was not measured."""
    said: str = ""
    """The message with which it showed it, or why there is no script or no confirmation."""
    bisection: str = ""
    """The part of Inductor at fault."""


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a failure of the lowest rung of a phase that failed."""

    rung: str
    phase: str
    module: str | None
    """The smallest that fails alone; ``None`` if only several do together, or it was not found."""
    fault: str
    """What is wrong with it."""
    trials: int
    """How many modules were tried."""
    trace: str
    """The artifact with the compiler's own trace."""
    reproduction: Reproduction
    ended: bool = False
    """Whether the search ran out of time with these results."""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def diagnose_all(context: RunContext, program: Program, failed: Sequence[Result], plan: RunPlan) -> Iterator[Diagnosis]:
    """Diagnose each of ``failed``, unless the job was asked to stop."""
    for result in failed:
        if any(gather(context.should_stop())):
            continue
        watch = Stopwatch()
        if context.rank == 0:
            context.report.log(f"{result.case.name}: looking for the failing module")
        try:
            found = diagnose(program, result, plan, context.paths.artifacts)
        except GroupLostError as error:
            context.report.log(f"the diagnosis of {result.case.name} ended early: {error}")
            return
        if found is not None:
            if context.rank == 0:
                context.report.span(f"{found.phase}/{found.rung}/diagnosis", watch.began, watch.now, found.row())
            yield found


def diagnose(program: Program, result: Result, plan: RunPlan, artifacts: Path) -> Diagnosis | None:
    """Investigate a rung that raised or lost parity, on all ranks together; rank 0 writes below ``artifacts``.

    Return ``None`` for other verdicts, which name their cause themselves, for a program that fails uncompiled too,
    and for one whose ranks run different modules: the verdict names the rank and its stage, and the ranks' trials
    would not meet.
    """
    case = result.case
    if result.verdict not in _ISOLATED or isinstance(program, Separable):
        return None
    try:
        baseline = make_baseline(program, case.phase, plan.iterations, any_rank)
        problem = ""
    except Exception as error:
        baseline, problem = None, describe(error)
    if any(gather(problem)) or baseline is None:
        return None
    folder = artifacts / "diagnosis" / f"{case.phase}-{case.rung.name}"
    search = _ModuleSearch(program, case, baseline, plan, time.monotonic() + SEARCH_S)
    with traced(folder / "trace"):
        unit = search.smallest()
    fault = search.faults.get(unit or "", result.findings[0].message if result.findings else "")
    reproduction = _reproduction(search, unit, folder) if unit else Reproduction(said="no module fails alone")
    trace = str((folder / "trace").relative_to(artifacts))
    ended = any(gather(search.ended))
    return Diagnosis(case.rung.name, case.phase, unit, fault, search.trials, trace, reproduction, ended)


def _reproduction(search: _ModuleSearch, unit: str, folder: Path) -> Reproduction:
    """Capture on all ranks, minimise and write on the first; the others wait."""
    program, case = search.program, search.case
    about = f"{search.faults[unit]}\n\nRung {case.rung.name}, module {unit}."
    try:
        graphs, problem = capture(program, case, unit), ""
    except UnsuitableError as error:
        graphs, problem = [], str(error)
    except Exception as error:
        graphs, problem = [], describe(error)
    found = Reproduction(said=problem or "another rank's graph cannot be run alone")
    if not any(gather(problem)) and rank_and_size()[0] == 0:
        try:
            found = _reproduce_alone(graphs, search, folder, about)
        except Exception as error:  # the results of the climb are known, and need no script
            found = Reproduction(said=f"it could not be written: {describe(error)}")
    gather(None)
    return found


def _reproduce_alone(graphs: list[Captured], search: _ModuleSearch, folder: Path, about: str) -> Reproduction:
    """Return the first graph that fails alone, reduced, as a script that has been tried."""
    rung, tolerance = search.case.rung, search.plan.tolerance
    fails = partial(_fails, rung, tolerance)
    failing = next((each for each in graphs if fails(each)), None)
    if failing is None:
        return Reproduction(said="its graphs, each alone and with the inputs of the first step, do not fail")
    try:
        small = minimise(failing, fails, search.deadline)
        search.ended |= time.monotonic() > search.deadline
        script = write(small, rung, tolerance, about.replace('"""', "'''").replace("\\", "/"), folder)
    except UnsuitableError as error:
        return Reproduction(said=str(error))
    left = search.deadline - time.monotonic()
    outcome = run_script(script)
    blamed = bisect(script, left) if outcome.shown and rung.generates_code else ""
    name = str(script.relative_to(folder.parent.parent))
    return Reproduction(name, small.operators, outcome.shown, outcome.said, blamed)


def _fails(rung: Rung, tolerance: Tolerance, captured: Captured) -> bool:
    """Return whether a graph fails compiled and runs uncompiled."""
    with empty_caches():
        compiled = as_compiled(captured.graph, rung.backend, rung.mode)
        try:
            return bool(difference(captured.graph, compiled, captured.inputs, tolerance.absolute, tolerance.ratio))
        except (RuntimeError, TypeError, ValueError) as error:
            log.debug("a part of the graph does not run: %s", error)
            return False


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass
class _ModuleSearch:
    """Tries single modules, the same on every rank."""

    program: Program
    case: RungCase
    baseline: Baseline
    plan: RunPlan
    deadline: float
    """The end of the search, of ``time.monotonic``."""
    trials: int = 0
    faults: dict[str, str] = field(default_factory=dict)
    """What is wrong with each that failed."""
    ended: bool = False
    """Whether it ran out of time."""

    def smallest(self) -> str | None:
        """Return the path of the smallest module that fails alone, or the smallest so far when time runs out;
        ``None`` if only several together fail.
        """
        units = tuple(build(self.program, self.case.phase, self.case.rung).units)
        unit = next((each for each in units if self.fails(each)), None)
        while unit is not None:
            inner = next((each for each in self._children(unit) if self.fails(each)), None)
            if inner is None:
                break
            unit = inner
        return unit

    def fails(self, unit: str) -> bool:
        """Return whether compiling ``unit`` alone raises or loses parity, on any rank."""
        if any(gather(time.monotonic() > self.deadline)):
            self.ended = True
            return False
        self.trials += 1
        _, problems = collective_attempt(lambda: self._fault(unit), str)
        fault = next((each for each in problems if each), "")
        if fault:
            self.faults[unit] = fault
        return bool(fault)

    def _fault(self, unit: str) -> str:
        with empty_caches(), self.baseline.precision(), random_numbers(self.baseline.eager, self.case.rung):
            try:
                built = build_only(self.program, self.case.phase, self.case.rung, unit)
                seen = record_run(built, self.plan.iterations, self.baseline.eager.starts)
            except Exception as error:
                return describe(error)
        for each in compare_runs(seen, self.baseline, self.plan.tolerance):
            if not each.passed:
                return f"{each.kind} {each.name}, iteration {each.iteration}: off by {each.max_abs:.3g}"
        return ""

    def _children(self, unit: str) -> Iterator[str]:
        """Yield the modules within that are called themselves: those in a container stand for it."""
        name, _, path = unit.partition(".")
        module = build(self.program, self.case.phase).parts.modules[name].get_submodule(path)
        yield from (f"{unit}.{child}" for child in _called_modules(module))


def _called_modules(module: nn.Module) -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from (f"{name}.{inner}" for inner in _called_modules(child))
        else:
            yield name
