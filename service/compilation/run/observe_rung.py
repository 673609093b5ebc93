"""Observes one rung in one phase: runs it beside the baseline, and records everything needed to judge it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from service.compilation.evidence import CompilerEvidence
from service.compilation.host_fault import fault_of_program
from service.compilation.instruments.caches import empty_caches, portable_cache, take_machine_code
from service.compilation.instruments.profile import allocated_bytes, peak, reset_peak
from service.compilation.instruments.recorder import Recorder, recorder
from service.compilation.instruments.replays import Replays
from service.compilation.instruments.switches import own_random_numbers, silent_switches
from service.compilation.monitor.boundary_monitor import BoundaryMonitor, monitored
from service.compilation.monitor.usage import Usage
from service.compilation.program import Program
from service.compilation.run.assessment import Assessment
from service.compilation.run.baseline import Baseline, Reference, UncompiledError, random_numbers
from service.compilation.run.built_program import BuiltProgram, StepRecord, build, record_step
from service.compilation.run.compare_runs import kinds_of, worth_keeping
from service.compilation.run.cost import pace, warm_seconds
from service.compilation.run.notes import notes_on_program
from service.compilation.run.observation import Cost, Observation, RungCase, Timed, training_outcome
from service.compilation.run.recorded_run import RecordedRun, Snapshot, record_run
from service.compilation.run.run_plan import RunPlan
from service.compilation.time_share import GivenUpError, given_up
from service.models.host_compiler import own_cache


def observe_rung(
    program: Program, case: RungCase, reference: Reference, plan: RunPlan, refused: str = ""
) -> Observation:
    """Observe the rung from empty caches; an exception becomes the observation's ``error``, unless it is the host's
    fault (:class:`HostFaultError`). The ``reference`` need be complete only once the rung has run.

    ``refused``: the error that it raised when generated code had to draw like eager. It then draws as in a job,
    and its results are compared by distribution.

    All rungs share this process: Dynamo is reset and the caches are emptied before each, which costs nothing,
    while a process of its own costs an import of PyTorch. This cannot undo global state set by the program
    itself, nor a crash of the compiler, which ends the process.
    """
    if case.rung.rehearses:
        return rehearse_rung(program, case, reference, plan)
    kept = own_cache() if case.rung.generates_code else None
    with (
        empty_caches() as folder,
        reference.precision(),
        own_random_numbers() if refused else random_numbers(reference.eager, case.rung),
        recorder(case.rung, program.device) as records,
    ):
        observer = _RungObserver(program, case, reference, plan, records, refused=refused)
        return observer.attempt(lambda: observer.observe(folder, kept))


def rehearse_rung(program: Program, case: RungCase, reference: Reference, plan: RunPlan) -> Observation:
    """Observe a rung that stands in for CUDA graphs."""
    replays = Replays(program.device)
    rehearsed = replace(case, rung=replace(case.rung, backend=replays.backend))
    return observe_rung_untimed(program, rehearsed, reference, plan, replays)


def observe_rung_untimed(
    program: Program, case: RungCase, reference: Reference, plan: RunPlan, replays: Replays | None = None
) -> Observation:
    """Observe the rung like :func:`observe_rung`, without its costs."""
    with empty_caches(), reference.precision(), recorder(case.rung, program.device) as records:
        observer = _RungObserver(program, case, reference, plan, records, replays)
        return observer.attempt(observer.observe_untimed)


@dataclass
class _RungObserver:
    """Runs the compiled program under watch."""

    program: Program
    case: RungCase
    reference: Reference
    plan: RunPlan
    records: Recorder
    replays: Replays | None = None
    refused: str = ""
    assessment: Assessment = field(init=False)
    """What is found out about its run, once that has ended."""
    monitor: BoundaryMonitor | None = None
    """The monitor of the judged iterations, once they have begun."""
    began: float = field(default_factory=time.monotonic)

    def attempt(self, observe: Callable[[], Observation]) -> Observation:
        """Return what ``observe`` does, or as much as was seen before it failed or took too long."""
        try:
            return observe()
        except GivenUpError as error:
            return Observation(self.case, given_up=str(error))
        except UncompiledError as error:
            return Observation(self.case, error=str(error))
        except Exception as error:
            message = fault_of_program(error)
            evidence = self.records.evidence(self.plan.warm_up, self.plan.steady)
            return Observation(self.case, evidence, message, usage=self._usage)

    def observe(self, folder: Path, kept: Path | None) -> Observation:
        """Return the observation of the rung, which compiles into ``folder``; its machine code stays in ``kept``."""
        self.plan.tells(f"{self.case.name}: compiling and running")
        besides = allocated_bytes(self.program.device)
        built = build(self.program, self.case.phase, self.case.rung)
        compiled = [built.parts.modules[name] for name in built.parts.compiled]
        switches = dict.fromkeys(switch for module in compiled for switch in silent_switches(module))
        run, cold_s = self._record_judged(built)
        memory = peak(self.program.device, besides)
        self.plan.tells(f"{self.case.name}: comparing")
        self._assess(built, run)
        settled = self._settle(built)
        generates = self.case.rung.generates_code
        timed = self._pace(settled)
        self.records.end_iteration()
        evidence = self.records.evidence(self.plan.warm_up, self.plan.steady, switches)
        if generates:
            self.plan.tells(f"{self.case.name}: starting from a filled cache")
        cache = portable_cache() if generates else None
        warm_s = warm_seconds(self.program, self.case, timed.race.step_s, cache, folder) if generates else None
        if kept is not None:
            take_machine_code(folder, kept)
        draws = self.assessment.draws_of_job()
        return replace(
            self._observation(built, run, evidence),
            draws=draws,
            cost=Cost(cold_s, warm_s, timed, memory, self.baseline.peak, cache),
        )

    def _pace(self, settled: BuiltProgram) -> Timed:
        """Time the program, and profile it."""
        self.plan.tells(f"{self.case.name}: timing")
        return pace(
            settled,
            self.plan.agree,
            self.plan.race_of(self.case.rung),
            self.plan.alone,
            beside_eager=self.case.rung.generates_code,
            profiles=lambda: self.plan.tells(f"{self.case.name}: profiling"),
        )

    def observe_untimed(self) -> Observation:
        """Return the observation without the rung's costs."""
        built = build(self.program, self.case.phase, self.case.rung)
        run, _ = self._record_judged(built)
        self._assess(built, run)
        return self._observation(built, run, self.records.evidence(self.plan.warm_up, self.plan.steady))

    def _assess(self, built: BuiltProgram, run: RecordedRun) -> None:
        baseline = self.reference.completed()
        self.assessment = Assessment(self.program, self.case, baseline, self.plan, self.refused)
        self.assessment.assess(built, run, self._record_watched)
        self.records.excuse()  # compilations of its own runs are no part of the judged iterations

    def _record_judged(self, built: BuiltProgram) -> tuple[RecordedRun, float]:
        """Record the iterations that count; return the seconds that compiling added to them, too.

        Peak memory counts from the end of warm-up, without the compiler's own.
        """
        seconds: list[float] = []
        compiled: list[bool] = []
        with self._monitored(built) as monitor:
            self.monitor = monitor

            def step(built: BuiltProgram, iteration: int) -> StepRecord:
                self._check_time()
                if iteration == self.plan.warm_up:
                    reset_peak(self.program.device)
                monitor.iteration = iteration
                start = time.perf_counter()
                record = record_step(built, iteration, monitor.handed_over)
                seconds.append(time.perf_counter() - start)
                compiled.append(self.records.end_iteration())
                return record

            run = record_run(built, self.plan.iterations, self.reference.eager.starts, step)
        return run, _cold_seconds(seconds, compiled)

    def _record_watched(self, built: BuiltProgram, starts: Sequence[Snapshot]) -> tuple[RecordedRun, Usage]:
        """Record a run from other states, and how it used its compiled modules."""
        with self._monitored(built) as monitor:

            def step(built: BuiltProgram, iteration: int) -> StepRecord:
                monitor.iteration = iteration
                return record_step(built, iteration, monitor.handed_over)

            run = record_run(built, self.plan.iterations, starts, step)
        return run, monitor.usage()

    @contextmanager
    def _monitored(self, built: BuiltProgram) -> Iterator[BoundaryMonitor]:
        with monitored(
            built.units,
            built.trainable,
            built.copied,
            built.parts.modules,
            transfers=self.replays.transfers if self.replays else None,
            sees_reads=self.case.rung.overwrites,
        ) as monitor:
            if self.replays:
                self.replays.follow(monitor)
            yield monitor

    def _settle(self, built: BuiltProgram) -> BuiltProgram:
        """Return the program begun again, some steps on. Code and CUDA graphs may be made again for objects
        that it creates at its beginning, such as a cache of keys or functions of its own; no job does either
        later.
        """
        again, period = built.restarted(), self.program.period
        for _ in range(-(-self.plan.warm_up // period) * period):
            again.step()
        self.records.excuse()
        return again

    def _observation(self, built: BuiltProgram, run: RecordedRun, evidence: CompilerEvidence) -> Observation:
        judged, usage = self.assessment, self._usage
        notes = (*judged.notes_on_draws(), *notes_on_program(self.baseline, usage), *judged.notes())
        return Observation(
            self.case,
            evidence,
            must_be_whole=self.plan.fullgraph,
            comparisons=worth_keeping(judged.comparisons),
            compared=len(judged.comparisons),
            kinds=kinds_of(judged.comparisons),
            training=training_outcome(run, self.baseline) if self.case.phase == "train" else None,
            truth_note=self.baseline.truth_note,
            notes=notes,
            units=tuple(built.units),
            calls=dict(self.baseline.calls),
            usage=usage,
            own_limit=judged.own_limit,
            audit=judged.audit,
        )

    @property
    def baseline(self) -> Baseline:
        return self.assessment.baseline

    @property
    def _usage(self) -> Usage:
        return self.monitor.usage() if self.monitor else Usage()

    def _check_time(self) -> None:
        """Raise :class:`GivenUpError` once the rung has taken longer than its share, on all ranks or none."""
        if self.plan.limit_s < math.inf:
            seconds = self.plan.agree(time.monotonic() - self.began)
            if seconds > self.plan.limit_s:
                raise GivenUpError(given_up(self.case.name, seconds))


def _cold_seconds(seconds: Sequence[float], compiled: Sequence[bool]) -> float:
    """Return the time that compiling added to its iterations, given the duration of each."""
    busy = [duration for duration, did in zip(seconds, compiled, strict=True) if did]
    quiet = [duration for duration, did in zip(seconds, compiled, strict=True) if not did]
    return max(sum(busy) - len(busy) * (median(quiet) if quiet else 0.0), 0.0)
