"""Runs the verification job: certifies a model's property on this rank of a mesh, and reports it in the job's log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from service.bounds.full_float32 import forbid_tf32
from service.bounds.interval import Interval
from service.bounds.memory import is_out_of_memory, keep_freed_memory, keep_workspaces_small, make_room
from service.bounds.methods import IBP, Bounder, BoundOptions, ProgressMeter
from service.bounds.methods.repeated import Repeating
from service.bounds.progress import OutOfTimeError
from service.jobs.events import BoundsRow
from service.jobs.runtime import ENDING, Completion, RunContext, Stopwatch
from service.jobs.spec.verify import VerifySpec
from service.parallel import distributed, early_start
from service.parallel.collectives import max_over_group, reduce_from_group
from service.parallel.distributed import peak_memory_gib
from service.parallel.mesh import Mesh
from service.verification import results
from service.verification.certify import certify
from service.verification.counterexample_rows import add_outputs
from service.verification.counterexamples import CounterexampleChecker
from service.verification.failures import RowFailures
from service.verification.load import LoadedTasks, bring_runtime, load_tasks
from service.verification.outside import OutsideAttack
from service.verification.progress import PHASES, JobProgress, PhaseTimes
from service.verification.results import DecidedRow, ResumeLog
from service.verification.rounding_guard import REASON, RoundingGuard
from service.verification.search_runner import SearchRunner, StoppedError
from service.verification.task import RefusedModel, Task, memory_of, method_of
from service.verification.verdict import Verdict


def run(spec: VerifySpec, context: RunContext) -> dict[str, Any] | None:
    """Bound every instance, reporting rows as they are found; rank 0 returns the result.

    Tensor-parallel ranks bound the same instances together, data-parallel ranks different ones. Decisions of
    earlier attempts are kept. Raises :class:`UnsupportedModelError` or ``PropertyError`` before any bounding if
    the model or the property is not supported, and :class:`~service.bounds.memory.MemoryShortageError` if
    memory runs out while other ranks wait for this one.
    """
    started = time.monotonic()
    forbid_tf32()
    keep_workspaces_small()
    keep_freed_memory()
    early_start.begin_context(context.device_type, distributed.read_launch(os.environ))
    bring_runtime(spec)
    device = distributed.start(context.device_type)
    early_start.begin_products(device)
    memory = memory_of(spec)
    try:
        with memory.enforced(device):
            return _run(spec, context, device, started)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise memory.shortage("verification", device, error) from error


def _run(spec: VerifySpec, context: RunContext, device: torch.device, started: float) -> dict[str, Any] | None:
    clock = PhaseTimes(device)
    with clock.phase("prepare"):
        loaded = load_tasks(spec, context, device)
    first = loaded.assignment
    ranks = _MeshReduction(first.mesh, device)
    if context.rank == 0:
        for line in _begun(loaded):
            context.report.log(line)
    own = _InstanceRunner(loaded, context, clock, ranks)
    context.report.phase("first row")
    own.run()
    context.report.phase(ENDING)
    spent = ranks.mean(torch.tensor(list(clock.seconds.values()), dtype=torch.float64))
    memory = ranks.most(peak_memory_gib(device))
    result = _result(loaded, own.resume_log, context) if context.rank == 0 else None
    if ranks.most(len(own.failures.errors)):  # no rank ends the job before the rows of all others are kept
        own.failures.raise_first(first.asked.count)
    if result is None:
        return None
    context.report.log(_describe_end(result["verdicts"], time.monotonic() - started))
    return {
        **result,
        "time": dict(zip(PHASES, spent, strict=True)),
        "memory_gib": memory,
        "wall_seconds": time.monotonic() - started,
    }


def _result(loaded: LoadedTasks, resume_log: ResumeLog, context: RunContext) -> dict[str, Any]:
    """Return the result from all ranks' rows, which become an artifact."""
    entries = sorted(resume_log.everything().values(), key=lambda entry: entry.instance)
    rows, first = [entry.row for entry in entries], loaded.assignment
    context.report.artifact(results.write_rows(rows, context.paths.artifacts), results.PARQUET)
    said = dict[str, None]()  # in order, each once
    for task in loaded.tasks:
        said |= {} if task.precision is None else {task.precision: None}
        said |= {f"optimised relaxations: {task.gains}": None} if task.gains else {}
    layers = (
        results.layer_means(task.layers, [each for each in entries if task.is_about(each.instance)])
        for task in loaded.tasks
    )
    return {
        **results.summary(rows, first.asked.has_labels, first.asked.eps),
        "method": first.method_label,
        **({"note": "; ".join(said)} if said else {}),
        "layers": [line for each in layers for line in each],
        "completed": Completion(done=len(rows), total=first.asked.count, unit="instances"),
    }


@dataclass(frozen=True)
class _MeshReduction:
    """Reductions over all ranks of a mesh; every rank calls, and continues when all have."""

    mesh: Mesh
    device: torch.device

    def mean(self, values: Tensor) -> list[float]:
        total = values.to(self.device)
        for axis in (self.mesh.tp, self.mesh.dp, self.mesh.pp):
            total = reduce_from_group(total, axis.group) / axis.size
        found: list[float] = total.tolist()
        return found

    def most(self, value: float) -> float:
        most = torch.tensor([value], dtype=torch.float64, device=self.device)
        for axis in (self.mesh.tp, self.mesh.dp, self.mesh.pp):
            most = max_over_group(most, axis.group)
        return float(most)


@dataclass(frozen=True, eq=False)
class _Checks:
    """What a verified row must pass before it is published."""

    guard: RoundingGuard
    outside: OutsideAttack
    clock: PhaseTimes

    def settled(self, entry: DecidedRow, limit: float) -> BoundsRow:
        """Return the row that is left, within ``limit`` seconds of the instance."""
        guarded = self.guard.settled(entry.row, limit)
        with self.clock.phase("replays"):
            return self.outside.settled(guarded, limit, overflows=entry.overflows)


@dataclass(eq=False)
class _InstanceRunner:
    """The instances of this rank, on the way from open to decided; a task has those of one model."""

    loaded: LoadedTasks
    context: RunContext
    clock: PhaseTimes
    ranks: _MeshReduction
    resume_log: ResumeLog = field(init=False)
    failures: RowFailures = field(init=False)
    progress: JobProgress | None = None

    def __post_init__(self) -> None:
        mesh, self.failures = self.ranks.mesh, RowFailures(self.context.report)
        self.resume_log = ResumeLog(self.context.paths.checkpoints, self.context.attempt, mesh.dp.rank)
        if mesh.tp.rank == 0 and mesh.dp.rank == 0:
            asked, groups = self.loaded.assignment.asked, self.loaded.assignment.groups
            self.progress = JobProgress.of_stage(self.context.report, asked.count, groups, mesh.pp.rank, mesh.pp.size)

    def run(self) -> None:
        """Run until every instance is decided or the attempt is asked to end."""
        decided = self._resume_rows()
        for each in self.loaded.refused:
            self._refuse(each, decided)
        with suppress(StoppedError):
            for task in self.loaded.tasks:
                self._run(task, decided)

    def _refuse(self, refused: RefusedModel, decided: set[int]) -> None:
        first = self.loaded.assignment
        own = [instance for instance in first.own if instance in refused.part and instance not in decided]
        if refused.fault is not None:
            self.failures.add(own, refused.fault)
            return
        method, asked = first.method_label, first.asked
        self._note_decided(
            [DecidedRow(results.refused_row(instance, method, asked, refused.reason), []) for instance in own]
        )

    def _run(self, task: Task, decided: set[int]) -> None:
        """Decide the instances of one model. Raises :class:`StoppedError`."""
        engine, enclosed = task.engine, None
        if (enclose := engine.enclosure(task.options)) is not None:
            enclosed = partial(_at_input, enclose, task.like)
        checker = CounterexampleChecker(task.module, engine.network.tp_group, task.runtime, enclosed)
        searches = SearchRunner(task, self.context, self.clock, checker)
        guard = RoundingGuard(task, checker, partial(_searched_again, self.context, self.clock))
        checks = _Checks(guard, OutsideAttack(task, self.context), self.clock)
        method = engine.repeated_bounder(method_of(task.spec))
        for instances in task.batches(without=decided):
            # All ranks of a group stop together: else some would wait for the others in a collective.
            if task.anywhere(self.context.should_stop()):
                raise StoppedError
            for entry in self._bound_batch(task, instances, method, searches, checks):
                search = partial(self._searched, task, entry, searches, checks)
                row = self.failures.unless_failed(task, [entry.instance], search)
                if row is None:
                    continue
                self._note_decided([DecidedRow(row, entry.layers)])
                if self.loaded.assignment.leads:
                    self.context.report.log(_searched(row))

    def _searched(self, task: Task, entry: DecidedRow, searches: SearchRunner, checks: _Checks) -> BoundsRow:
        row = checks.settled(replace(entry, row=searches.decided(entry.row)), searches.limit(entry.instance))
        task.visited.clear()  # where no file is attacked, nothing else takes them
        return add_outputs(row, task, checks.guard.checker)

    def _resume_rows(self) -> set[int]:
        """Return the instances that all ranks know as decided. Their rows are reported again, since the last
        ones may not have arrived.
        """
        earlier = self.resume_log.earlier()
        known = torch.zeros(self.loaded.assignment.asked.count, dtype=torch.float64)
        known[list(earlier)] = 1
        decided = {index for index, share in enumerate(self.ranks.mean(known)) if share == 1}
        own = [earlier[instance] for instance in self.loaded.assignment.own if instance in decided]
        self._report_rows(own)
        if self.progress is not None:
            self.progress.resume(len(own))
        if decided and self.context.rank == 0:
            self.context.report.log(f"{len(decided)} instances were decided by an earlier attempt")
        return decided

    def _bound_batch(
        self, task: Task, instances: list[int], method: Bounder, searches: SearchRunner, checks: _Checks
    ) -> list[DecidedRow]:
        """Bound a batch, decide its instances, and return those left for a search."""
        watch, limits = Stopwatch(), [searches.limit(instance) for instance in instances]
        bound = partial(self._entries, task, instances, method, checks.guard.checker, time.monotonic() + sum(limits))
        entries = self.failures.unless_failed(task, instances, bound) or []
        self.context.report.span("bound", watch.began, watch.now, {"instances": len(instances)})
        each = watch.seconds / len(instances)
        entries = [replace(entry, row=replace(entry.row, seconds=each)) for entry in entries]
        waiting = [entry for entry in entries if task.search_group.anywhere(searches.wants(entry.row), task.device)]
        ready = [entry for entry in entries if entry not in waiting]
        for entry in ready:
            settle = partial(checks.settled, entry, searches.limit(entry.instance))
            if (row := self.failures.unless_failed(task, [entry.instance], settle)) is not None:
                self._record([replace(entry, row=row)])
        self._count(len(ready))
        return waiting

    def _entries(
        self, task: Task, instances: list[int], method: Bounder, checker: CounterexampleChecker, deadline: float
    ) -> list[DecidedRow]:
        """Bound a batch, in smaller ones where memory runs out, or where an error occurs; an instance that is too
        large by itself stays undecided. Instances that are not bounded by the deadline get interval bounds.
        """
        try:
            return self._at_once(task, instances, method, checker, deadline)
        except OutOfTimeError:
            return self._by_intervals(task, instances, checker)
        except Exception as error:
            is_short = task.engine.survives(error)
            if not is_short and (len(instances) == 1 or not task.is_alone):
                raise
            shortage = task.memory.shortage("the bounds", task.device, error) if is_short else None
        if isinstance(method, Repeating):
            method.forget()
        make_room(task.device)
        if len(instances) == 1:
            row = results.refused_row(instances[0], task.method_label, task.asked, str(shortage))
            return [DecidedRow(row, [])]
        half, found = len(instances) // 2, list[DecidedRow]()
        for part in (instances[:half], instances[half:]):
            bound = partial(self._entries, task, part, method, checker, deadline)
            found += self.failures.unless_failed(task, part, bound) or []
        return found

    def _by_intervals(self, task: Task, instances: list[int], checker: CounterexampleChecker) -> list[DecidedRow]:
        """Bound a batch by intervals, which take almost no time, once the time has run out."""
        make_room(task.device)
        note = f"its seconds were spent on bounds by {task.method_label}; these are by intervals"
        entries = self._at_once(task, instances, task.engine.bounder(IBP), checker, inf)
        rows = [replace(each.row, method=IBP.label + task.engine.arithmetic.note) for each in entries]
        reasons = [note if row.verdict == Verdict.UNKNOWN.value else None for row in rows]
        found = zip(rows, reasons, entries, strict=True)
        return [replace(entry, row=replace(row, reason=reason)) for row, reason, entry in found]

    def _at_once(
        self, task: Task, instances: list[int], method: Bounder, checker: CounterexampleChecker, deadline: float
    ) -> list[DecidedRow]:
        batch, options = (
            task.asked.batch(instances, task.like),
            self._options_with_progress(task, len(instances), deadline),
        )
        outcome = certify(task.engine, checker, method, options, batch, clock=self.clock)
        predictions = checker.predictions(batch) if task.asked.has_labels else None
        found = results.rows_of(outcome, task.method_label, task.asked, predictions)
        rows = [add_outputs(replace(row, note=task.precision), task, checker) for row in found]
        layers = task.engine.gathered(results.layer_sums(task.engine.network, outcome, task.mesh), 1).tolist()
        return [DecidedRow(*each) for each in zip(rows, layers, outcome.overflows, strict=True)]

    def _options_with_progress(self, task: Task, size: int, deadline: float) -> BoundOptions:
        """Return the task's options, with a progress that reports the analysis of a batch of ``size``
        instances, and ends it at the deadline if no other rank waits.
        """

        def tell(share: float) -> None:
            if self.progress is not None:
                self.progress.analyse(size, share)

        if self.progress is not None:
            self.progress.begin_batch()
        if task.is_alone:
            return task.options.until(deadline, tell)
        return task.options if self.progress is None else replace(task.options, progress=ProgressMeter(tell))

    def _note_decided(self, entries: list[DecidedRow]) -> None:
        self._record(entries)
        self._count(len(entries))

    def _record(self, entries: list[DecidedRow]) -> None:
        if self.loaded.assignment.leads:
            self.resume_log.add(entries)
        self._report_rows(entries)

    def _count(self, decided: int) -> None:
        if self.progress is not None:
            self.progress.decide(decided)

    def _report_rows(self, entries: list[DecidedRow]) -> None:
        for entry in entries if self.loaded.assignment.leads else ():
            self.context.report.bound(entry.row)


def _searched_again(
    context: RunContext, clock: PhaseTimes, task: Task, checker: CounterexampleChecker, row: BoundsRow
) -> BoundsRow:
    """Return a search of a row in another arithmetic, if the job searches."""
    searches = SearchRunner(task, context, clock, checker)
    return add_outputs(searches.decided(row), task, checker) if searches.wants(row) else replace(row, reason=REASON)


def _at_input(enclose: Callable[[Interval], Interval], like: Tensor, x: Tensor) -> Interval:
    """Return bounds ``(outputs,)`` of the outputs at one input ``(features,)``."""
    return enclose(Interval.point(x[None].to(like)))


def _begun(loaded: LoadedTasks) -> Iterator[str]:
    """Yield the instances, the method, the layout, the network, and notes on its analysis."""
    first = loaded.assignment
    count, parallel = first.asked.count, first.spec.parallel
    instances = f"{count:,} instance{'s' * (count != 1)}"
    yield f"{instances} by {first.method_label} on {parallel.arithmetic} rank{'s' * (parallel.world_size > 1)}"
    yield from dict.fromkeys(line for task in loaded.tasks for line in (_network(task), *task.notes))
    yield from dict.fromkeys(task.precision for task in loaded.tasks if task.precision is not None)


def _network(task: Task) -> str:
    inputs, budget = prod(task.engine.network.graph.input.shape), task.spec.budget
    neurons, layers = sum(layer.neurons for layer in task.layers), len(task.layers)
    seconds = "" if budget.seconds is None else f", {budget.seconds:g} s for an instance"
    return (
        f"network: {inputs:,} inputs, {neurons:,} nonlinear neurons in {layers} layer{'s' * (layers != 1)}; "
        f"batches of {budget.batch}{seconds}"
    )


def _searched(row: BoundsRow) -> str:
    """Return how the search for one instance ended."""
    how = f" by {row.decided_by}" if row.decided_by else f", {row.reason}" if row.reason else ""
    domains = f"{row.domains:,} domain{'s' * (row.domains != 1)}"
    return f"instance {row.instance}: {row.verdict}{how} ({domains}, {row.seconds:.1f} s)"


def _describe_end(verdicts: Mapping[str, int], seconds: float) -> str:
    """Return the job's result."""
    found = ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.items() if count)
    return f"{found or 'no instances'} after {seconds:.1f} s"
