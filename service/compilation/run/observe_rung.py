"""Runs one rung in one phase, and records everything needed to judge it."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from service.compilation.evidence import CompilerEvidence
from service.compilation.host_fault import raise_host_fault
from service.compilation.instruments.caches import (
    empty_caches,
    forget_compiled,
    portable_cache,
    take_machine_code,
)
from service.compilation.instruments.profile import peak, reset_peak, used
from service.compilation.instruments.recorder import Recorder, recorder
from service.compilation.instruments.replays import Replays
from service.compilation.instruments.switches import own_random_numbers, silent_switches
from service.compilation.instruments.text import first_line
from service.compilation.instruments.toolchain import own_cache
from service.compilation.monitor.boundary_monitor import BoundaryMonitor, monitored
from service.compilation.monitor.usage import Usage
from service.compilation.program import Program
from service.compilation.run.audit import Audit, audit, names_of, unseen_in
from service.compilation.run.baseline import Reference, Run, follow, seed
from service.compilation.run.built_program import ProgramRun, StepRecord, build, record_step
from service.compilation.run.compare_runs import compare_runs, kinds_of, worth_keeping
from service.compilation.run.cost import pace, warm_seconds
from service.compilation.run.distribution import PLAN, differs_in_distribution
from service.compilation.run.draws import draws_like_eager, precision, random_numbers
from service.compilation.run.kinks import are_kinks, doubtful, drew_otherwise, jumps, own_limit
from service.compilation.run.observation import Cost, Observation, RungCase, training_outcome
from service.compilation.run.parity import Comparison
from service.compilation.run.recorded_run import Snapshot
from service.compilation.run.timing import RaceSettings
from service.compilation.rungs import Rung
from service.compilation.time_share import ENDLESS, GivenUpError, TimeShare, given_up
from service.jobs.spec.compile import Tolerance

_BRIEF, _FEWEST_BRIEF = 6, 2
"""How much shorter a race that decides nothing is, and each of its blocks; and its fewest rounds."""
_REDRAWN = "other random numbers, of the same distribution"
_KINK = "the other side of a kink"
_INTERNALS = str(Path(__file__).parents[1] / "instruments")


def _tell_nobody(name: str) -> None:
    """Take the name of a run that begins."""


@dataclass(frozen=True)
class RunPlan:
    """Says how long to observe: ``iterations`` are judged; from ``warm_up`` on nothing may be compiled, from
    ``steady`` on no CUDA graph may be recorded. ``agree`` makes one duration for all out of each rank's.
    ``alone`` is entered to measure a pace: other processes may wish to do so at the same time.
    """

    iterations: int
    warm_up: int
    steady: int
    tolerance: Tolerance
    agree: Callable[[float], float]
    race: RaceSettings = field(default_factory=RaceSettings)
    alone: Callable[[], AbstractContextManager[None]] = nullcontext
    tells: Callable[[str], None] = _tell_nobody
    """Called with the name of each run that begins."""
    share: TimeShare = ENDLESS
    limit_s: float = math.inf
    """The seconds after which a rung is given up, at the next of its iterations."""

    def race_of(self, rung: Rung) -> RaceSettings:
        """Return the length of the race: a rung that generates no code is no faster, and its pace decides nothing."""
        race = self.race
        brief = replace(
            race, block_s=race.block_s / _BRIEF, budget_s=race.budget_s / _BRIEF, fewest_rounds=_FEWEST_BRIEF
        )
        return self.race if rung.generates_code else brief


def plan_run(program: Program, steps: int, tolerance: Tolerance, agree: Callable[[float], float]) -> RunPlan:
    """Plan at least ``steps`` iterations, and enough to see every input shape again after warm-up.

    Warm-up is one pass over the shapes and two more iterations: one may make a dimension or a number dynamic,
    and a change that a first call leaves, such as a hook in an empty dictionary, may cause compilations in the
    next two. A CUDA graph is recorded
    at the second call that needs it, and its faults show from the second replay on.
    """
    period, warm_up = program.period, program.period + 2
    steady = 3 * period + 2
    enough = steady + period + 2 if program.device.type == "cuda" else 2 * period + 2
    return RunPlan(max(steps, enough), warm_up, steady, tolerance, agree)


def run_rung(program: Program, case: RungCase, reference: Reference, plan: RunPlan, refused: str = "") -> Observation:
    """Run the rung from empty caches; an exception becomes the observation's ``error``, unless it is the host's fault
    (:class:`HostFaultError`).

    ``refused``: the error that it raised when generated code had to draw like eager. It then draws as in a job,
    and its results are compared by distribution.

    All rungs share this process: Dynamo is reset and the caches are emptied before each, which costs nothing,
    while a process of its own costs an import of PyTorch. This cannot undo global state set by the program
    itself, nor a crash of the compiler, which ends the process.
    """
    kept = own_cache() if case.rung.generates_code else None
    with (
        empty_caches() as folder,
        precision(reference),
        own_random_numbers() if refused else random_numbers(case.rung, reference),
        recorder(case.rung, program.device) as records,
    ):
        look = _RungRun(program, case, reference, plan, records, refused=refused)
        try:
            return look.observation(folder, kept)
        except GivenUpError as error:
            return Observation(case, given_up=str(error))
        except Exception as error:
            raise_host_fault(error)
            return look.failure(describe(error))


def rehearse_rung(program: Program, case: RungCase, reference: Reference, plan: RunPlan) -> Observation:
    """Run a rung that stands in for CUDA graphs."""
    replays = Replays(program.device)
    rehearsed = replace(case, rung=replace(case.rung, backend=replays.backend))
    return run_rung_untimed(program, rehearsed, reference, plan, replays)


def run_rung_untimed(
    program: Program, case: RungCase, reference: Reference, plan: RunPlan, replays: Replays | None = None
) -> Observation:
    """Run the rung like :func:`run_rung`, without timing it."""
    with empty_caches(), precision(reference), recorder(case.rung, program.device) as records:
        look = _RungRun(program, case, reference, plan, records, replays)
        try:
            return look.judged()
        except GivenUpError as error:
            return Observation(case, given_up=str(error))
        except Exception as error:
            raise_host_fault(error)
            return look.failure(describe(error))


@dataclass
class _RungRun:
    program: Program
    case: RungCase
    reference: Reference
    plan: RunPlan
    records: Recorder
    replays: Replays | None = None
    refused: str = ""
    monitor: BoundaryMonitor | None = None
    audit: Audit = field(default_factory=Audit)
    comparisons: list[Comparison] = field(default_factory=list)
    redrawn: bool = False
    seeds: int = PLAN.seeds
    kinks: tuple[Comparison, ...] = ()
    began: float = field(default_factory=time.monotonic)

    def observation(self, folder: Path, kept: Path | None) -> Observation:
        """Return the observation of the rung, which compiles into ``folder``; its machine code stays in ``kept``."""
        besides = used(self.program.device)
        program_run = build(self.program, self.case.phase, self.case.rung)
        compiled = [program_run.parts.modules[name] for name in program_run.parts.compiled]
        switches = dict.fromkeys(switch for module in compiled for switch in silent_switches(module))
        self.plan.tells(f"{self._name}: compiling and running")
        run, cold_s = self._judged_run(program_run)
        memory = peak(self.program.device, besides)
        self.plan.tells(f"{self._name}: comparing")
        self._look_closer(program_run, run)
        settled = self._settled(program_run)
        generates = self.case.rung.generates_code
        self.plan.tells(f"{self._name}: timing")
        race = self.plan.race_of(self.case.rung)
        timed = pace(settled, self.plan.agree, race, self.plan.alone, beside_eager=generates)
        self.records.end_iteration()
        evidence = self.records.evidence(self.plan.warm_up, self.plan.steady, switches)
        cache = portable_cache() if generates else None
        warm_s = warm_seconds(self.program, self.case, timed.race.step_s, cache, folder) if generates else None
        if kept is not None:
            take_machine_code(folder, kept)
        draws = self._own_draws()
        return replace(
            self._compared(program_run, run, evidence),
            draws=draws,
            cost=Cost(cold_s, warm_s, timed, memory, self.reference.peak, cache),
        )

    def _look_closer(self, program_run: ProgramRun, run: Run) -> None:
        """Compare, and run the program again if that is not conclusive."""
        self.comparisons = list(compare_runs(run, self.reference, self.plan.tolerance))
        self._excuse_draws(program_run, run)
        self._excuse_kinks(run)
        self._audit(program_run)
        self.records.excuse()

    def _excuse_draws(self, program_run: ProgramRun, run: Run) -> None:
        """Excuse results that differ only because of other random numbers of the same distribution.

        All ranks look, or none. Without decompositions a rung draws like eager, unless it leaves the generator in
        another state: a compiled program may take another path, such as another kernel of attention. A known limit of
        the rung is no such case.
        """
        wrong = [each for each in self.comparisons if not each.passed]
        own = own_limit(self.case.rung, self.reference, self.comparisons)
        otherwise = self.case.rung.decomposes or (not own and drew_otherwise(run, self.reference))
        may = otherwise and self.reference.eager.random and not any(each.stale_by for each in wrong)
        if self.plan.agree(float(may and bool(wrong))):
            self.redrawn = not self._differs_in_distribution(program_run) and may and bool(wrong)
        if self.redrawn:
            self.comparisons = [each if each.passed else _excused(each, _REDRAWN) for each in self.comparisons]

    def _excuse_kinks(self, run: Run) -> None:
        """Leave out gradients that rounding decides in eager too. All ranks look, or none."""
        found = doubtful(self.comparisons, len(run.records))
        if not self.plan.agree(float(bool(found))):
            return
        most = jumps(self.program, self.case.phase, self.reference)
        if are_kinks(found, run, self.reference, most):
            self.kinks = found
            self.comparisons = [each if each.passed else _excused(each, _KINK) for each in self.comparisons]

    def _own_draws(self) -> str:
        """Return the result whose distribution differs from eager's when generated code draws as in a job."""
        drawn = self.case.rung.generates_code and self.plan.agree(float(self.reference.eager.random))
        if self.refused or not drawn:
            return ""  # it was compared with such draws
        with own_random_numbers():
            forget_compiled()
            return self._differs_in_distribution(build(self.program, self.case.phase, self.case.rung))

    def _differs_in_distribution(self, program_run: ProgramRun) -> str:
        differs, self.seeds = differs_in_distribution(program_run, self.reference, self.plan.tolerance, self.plan.agree)
        return differs

    def _audit(self, program_run: ProgramRun) -> None:
        """Find out whether stale memory is read, if parity could not see it. All ranks do, or none."""
        rung, tolerance = self.case.rung, self.plan.tolerance
        unseen = unseen_in(self.reference, self.program.period) if rung.overwrites else ()
        if not all(each.passed for each in self.comparisons):
            unseen = ()  # something was found
        if not self.plan.agree(float(bool(unseen))):
            return
        try:
            self.audit = audit(unseen, program_run.restarted(), self._watched, self.reference, tolerance)
        except Exception as error:
            raise_host_fault(error)
            self.audit = Audit(tuple(map(" ".join, unseen)), problem=f"with shuffled parameters {describe(error)}")

    def _watched(self, program_run: ProgramRun, starts: Sequence[Snapshot]) -> tuple[Run, Usage]:
        with self._monitored(program_run) as monitor:

            def step(iteration: int) -> StepRecord:
                monitor.iteration = iteration
                return _timed(program_run, iteration)[0]

            run = follow(program_run, self.plan.iterations, step, starts)
        return run, monitor.usage()

    @contextmanager
    def _monitored(self, program_run: ProgramRun) -> Iterator[BoundaryMonitor]:
        with monitored(
            program_run.units,
            program_run.trainable,
            program_run.copied,
            program_run.parts.modules,
            transfers=self.replays.transfers if self.replays else None,
            sees_reads=self.case.rung.overwrites,
        ) as monitor:
            if self.replays:
                self.replays.follow(monitor)
            yield monitor

    def _settled(self, program_run: ProgramRun) -> ProgramRun:
        """Return the program begun again, some steps on. Code and CUDA graphs may be made again for objects
        that it creates at its beginning, such as a cache of keys or functions of its own; no job does either
        later.
        """
        again, period = program_run.restarted(), self.program.period
        for _ in range(-(-self.plan.warm_up // period) * period):
            again.step()
        self.records.excuse()
        return again

    def judged(self) -> Observation:
        """Return the observation without the rung's costs."""
        program_run = build(self.program, self.case.phase, self.case.rung)
        run, _ = self._judged_run(program_run)
        self._look_closer(program_run, run)
        return self._compared(program_run, run, self.records.evidence(self.plan.warm_up, self.plan.steady))

    def _compared(self, program_run: ProgramRun, run: Run, evidence: CompilerEvidence) -> Observation:
        comparisons = self.comparisons
        return Observation(
            self.case,
            evidence,
            comparisons=worth_keeping(comparisons),
            compared=len(comparisons),
            kinds=kinds_of(comparisons),
            training=training_outcome(run, self.reference) if self.case.phase == "train" else None,
            truth_note=self.reference.truth_note,
            notes=tuple(self._notes()),
            units=tuple(program_run.units),
            calls=dict(self.reference.calls),
            usage=self._usage,
            own_limit=own_limit(self.case.rung, self.reference, comparisons),
            audit=self.audit,
        )

    def _notes(self) -> Iterator[str]:
        if self.refused:
            yield f"with fallback_random, which no job has, it ends with {self.refused}"
        elif draws_like_eager(self.case.rung, self.reference):
            yield "ran with fallback_random: a job's own draws will differ from eager's"
        yield from _notes(self.reference, self._usage)
        if self.redrawn:
            yield "draws other random numbers than eager, of the same distribution over seeds"
        if self.seeds < PLAN.seeds:
            yield f"distributions were compared over {self.seeds} seeds instead of {PLAN.seeds}: a step takes too long"
        if self.kinks:
            names = names_of(sorted({each.name for each in self.kinks}))
            yield f"rounding decides on which side of a kink, as of a relu, in eager too: {names}"
        if self.audit.unseen and not (self.audit.read or self.audit.problem):
            same = f"a stale value would be the right one of {names_of(self.audit.unseen)}, the same in every iteration"
            yield f"{same}: with shuffled parameters, or for want of anything held over a replay, none is read"

    def failure(self, error: str) -> Observation:
        """Return the observation up to the rung's error."""
        evidence = self.records.evidence(self.plan.warm_up, self.plan.steady)
        return Observation(self.case, evidence, error, usage=self._usage)

    @property
    def _usage(self) -> Usage:
        return self.monitor.usage() if self.monitor else Usage()

    @property
    def _name(self) -> str:
        return f"{self.case.phase}/{self.case.rung.name}"

    def _check_time(self) -> None:
        """Raise :class:`GivenUpError` once the rung has taken longer than its share, on all ranks or none."""
        if self.plan.limit_s < math.inf:
            seconds = self.plan.agree(time.monotonic() - self.began)
            if seconds > self.plan.limit_s:
                raise GivenUpError(given_up(self._name, seconds))

    def _judged_run(self, program_run: ProgramRun) -> tuple[Run, float]:
        """Return the iterations that count, and the seconds that compiling added to them.

        Peak memory counts from the end of warm-up, without the compiler's own.
        """
        seconds: list[float] = []
        compiled: list[bool] = []
        with self._monitored(program_run) as monitor:
            self.monitor = monitor

            def step(iteration: int) -> StepRecord:
                self._check_time()
                if iteration == self.plan.warm_up:
                    reset_peak(self.program.device)
                monitor.iteration = iteration
                seen, duration = _timed(program_run, iteration)
                seconds.append(duration)
                compiled.append(self.records.end_iteration())
                return seen

            run = follow(program_run, self.plan.iterations, step, self.reference.eager.starts)
        return run, _cold_seconds(seconds, compiled)


def _excused(comparison: Comparison, why: str) -> Comparison:
    return replace(comparison, excess=0.0, is_noisy=False, note=why)


def _cold_seconds(seconds: Sequence[float], compiled: Sequence[bool]) -> float:
    """Return the time that compiling added to its iterations, given the duration of each."""
    busy = [duration for duration, did in zip(seconds, compiled, strict=True) if did]
    quiet = [duration for duration, did in zip(seconds, compiled, strict=True) if not did]
    return max(sum(busy) - len(busy) * (median(quiet) if quiet else 0.0), 0.0)


def describe(error: Exception) -> str:
    """Return the class, the first line of the message, and the last place outside of installed packages and of the
    monitors.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and _INTERNALS not in frame.filename
    ]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(str(error))}{place}"


def _timed(program_run: ProgramRun, iteration: int) -> tuple[StepRecord, float]:
    seed(iteration)
    start = time.perf_counter()
    seen = record_step(program_run)
    return seen, time.perf_counter() - start


def _notes(reference: Reference, usage: Usage) -> Iterator[str]:
    if reference.eager.random:
        yield "draws random numbers"
    if reference.overwritten:
        yield f"updates in place what it is given: {', '.join(reference.overwritten)}"
    if reference.noise:
        apart = f"{reference.noise:.2%} of a tensor's size"
        yield f"two eager runs differ, by up to {apart}; the tolerance is wider by that"
    if moved := reference.hidden_by_tf32:
        yield (
            f"TF32 (allow_tf32) moves eager's own results by up to {moved:.1%} of their size, and would hide errors: "
            "judged, and timed, in full float32"
        )
    if reference.rounds_to_tf32:
        yield "float32 factors may be rounded to TF32 (allow_tf32); the tolerance is wider by twice what that moves"
    if reference.unused:
        names = names_of(sorted(reference.unused))
        yield f"no gradient, in eager neither, and no loss depends on them: {names}"
    if len(threads := dict.fromkeys(call.thread for call in usage.invocations)) > 1:
        yield f"compiled modules are called from several threads: {', '.join(threads)}"
    if usage.outside:
        yield f"called past the boundary: {', '.join(sorted({str(origin) for origin in usage.outside}))}"
    for each, count in reference.calls.items():
        if each.is_bypass:
            yield f"{each} is called {count} times, which does not go through the compiled forward of {each.unit}"
