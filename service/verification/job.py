"""The verification job: certify a property of a model, on this rank of a mesh."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from service.bounds.memory import is_out_of_memory, make_room
from service.bounds.methods import Effort, Method, ProgressMeter
from service.bounds.methods.repeated import Repeating
from service.bounds.workspace import keep_workspaces_small
from service.jobs.bounds_row import BoundsRow
from service.jobs.runtime import Completion, RunContext
from service.jobs.spec.verify import VerifySpec
from service.parallel import distributed
from service.verification import report, tally
from service.verification.certify import certify
from service.verification.clock import PHASES, Clock, peak_memory_gib
from service.verification.ledger import Entry, Ledger
from service.verification.making import Prepared, make
from service.verification.pace import Pace
from service.verification.ranks import Ranks
from service.verification.searching import Searches, StoppedError
from service.verification.task import Refused, Task, memory_of
from service.verification.witness import Referee


def run(spec: VerifySpec, context: RunContext) -> dict[str, Any] | None:
    """Bound every instance, reporting rows as they are found; rank 0 returns the result.

    Tensor-parallel ranks bound the same instances together, data-parallel ranks different ones. What an earlier
    attempt decided is not done again. Raises :class:`UnsupportedModelError` or ``PropertyError`` before any bounding
    when the model or the property cannot be done, :class:`~service.bounds.memory.MemoryShortageError` where memory ends
    and other ranks wait for this one.
    """
    started = time.monotonic()
    # A last bit of float32 decides nothing here, but TF32's ten-bit products would.
    torch.set_float32_matmul_precision("highest")
    keep_workspaces_small()
    device = distributed.start(context.device_type)
    memory = memory_of(spec)
    try:
        with memory.enforced(device):
            return _run(spec, context, device, started)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise memory.shortage("verification", device, error) from error


def _run(spec: VerifySpec, context: RunContext, device: torch.device, started: float) -> dict[str, Any] | None:
    clock = Clock(device)
    with clock.phase("prepare"):
        prepared = make(spec, context, device)
    first = prepared.assignment
    ranks = Ranks(first.mesh, device)
    count = first.asked.count
    instances = f"{count} instance{'' if count == 1 else 's'}"
    if context.rank == 0:
        context.report.log(f"{instances} by {first.method_name} on {spec.parallel.arithmetic} ranks")
        for note in dict.fromkeys(note for task in prepared.tasks for note in task.notes):
            context.report.log(note)
    own = _Own(prepared, context, clock, ranks)
    own.run()
    spent = ranks.mean(torch.tensor(list(clock.seconds.values()), dtype=torch.float64))
    memory = ranks.most(peak_memory_gib(device))
    if context.rank != 0:
        return None
    return {
        **_result(prepared, own.ledger, context),
        "time": dict(zip(PHASES, spent, strict=True)),
        "memory_gib": memory,
        "wall_seconds": time.monotonic() - started,
    }


def _result(prepared: Prepared, ledger: Ledger, context: RunContext) -> dict[str, Any]:
    """What all ranks' rows say, which become an artifact."""
    entries = sorted(ledger.everything().values(), key=lambda entry: entry.instance)
    rows, first = [entry.row for entry in entries], prepared.assignment
    context.report.artifact(report.write(rows, context.paths.artifacts), report.MEDIA_TYPE)
    layers = (
        tally.layer_means(task.layers, [each for each in entries if task.is_about(each.instance)])
        for task in prepared.tasks
    )
    return {
        **tally.summary(rows, first.asked.has_labels, first.asked.eps),
        "method": first.method_name,
        "layers": [line for each in layers for line in each],
        "completed": Completion(done=len(rows), total=first.asked.count, unit="instances"),
    }


@dataclass(eq=False)
class _Own:
    """The instances of this rank, on the way from open to decided; a task has those of one model."""

    prepared: Prepared
    context: RunContext
    clock: Clock
    ranks: Ranks
    ledger: Ledger = field(init=False)
    pace: Pace | None = None

    def __post_init__(self) -> None:
        mesh = self.ranks.mesh
        self.ledger = Ledger(self.context.paths.checkpoints, self.context.attempt, mesh.dp.rank)
        if mesh.tp.rank == 0 and mesh.dp.rank == 0:
            asked, groups = self.prepared.assignment.asked, self.prepared.assignment.groups
            self.pace = Pace.of_stage(self.context.report, asked.count, groups, mesh.pp.rank, mesh.pp.size)

    def run(self) -> None:
        """Until every instance is decided or the attempt is asked to end."""
        decided = self._resumed()
        for each in self.prepared.refused:
            self._refuse(each, decided)
        with suppress(StoppedError):
            for task in self.prepared.tasks:
                self._run(task, decided)

    def _refuse(self, refused: Refused, decided: set[int]) -> None:
        first = self.prepared.assignment
        own = [instance for instance in first.own if instance in refused.part and instance not in decided]
        method, asked = first.method_name, first.asked
        self._decided([Entry(tally.refused_row(instance, method, asked, refused.reason), []) for instance in own])

    def _run(self, task: Task, decided: set[int]) -> None:
        """Raises :class:`StoppedError`."""
        enclosed = task.enclosed if task.spec.rigorous else None
        referee = Referee(task.module, task.network.exchange, task.runtime, enclosed)
        searches, method = Searches(task, self.context, self.clock, referee), task.method()
        for instances in task.batches(without=decided):
            # A group stops as one: its ranks would otherwise wait for each other in a collective.
            if task.anywhere(self.context.should_stop()):
                raise StoppedError
            for entry in self._bounded(task, instances, method, referee, searches):
                self._decided([Entry(_shown(searches.decided(entry.row), task, referee), entry.layers)])

    def _resumed(self) -> set[int]:
        """Instances that all ranks know as decided. Their rows are told again: the last ones may not have arrived."""
        earlier = self.ledger.earlier()
        known = torch.zeros(self.prepared.assignment.asked.count, dtype=torch.float64)
        known[list(earlier)] = 1
        decided = {index for index, share in enumerate(self.ranks.mean(known)) if share == 1}
        own = [earlier[instance] for instance in self.prepared.assignment.own if instance in decided]
        for entry in own:
            self._tell(entry)
        if self.pace is not None:
            self.pace.resume(len(own))
        if decided and self.context.rank == 0:
            self.context.report.log(f"{len(decided)} instances were decided by an earlier attempt")
        return decided

    def _bounded(
        self, task: Task, instances: list[int], method: Method, referee: Referee, searches: Searches
    ) -> list[Entry]:
        """Bound a batch; what is left for a search is returned, the rest is decided."""
        begun = time.time()
        entries = self._entries(task, instances, method, referee)
        self.context.report.span("bound", begun, time.time(), {"instances": len(instances)})
        waiting = [entry for entry in entries if task.crew.anywhere(searches.wants(entry.row), task.device)]
        self._decided([entry for entry in entries if entry not in waiting])
        return waiting

    def _entries(self, task: Task, instances: list[int], method: Method, referee: Referee) -> list[Entry]:
        """Of a batch, in smaller ones where memory runs out; an instance that alone is too large stays undecided."""
        try:
            return self._at_once(task, instances, method, referee)
        except Exception as error:
            if not task.bounds_survive(error):
                raise
            shortage = task.memory.shortage("the bounds", task.device, error)
        if isinstance(method, Repeating):
            method.forget()
        make_room(task.device)
        if len(instances) == 1:
            row = tally.refused_row(instances[0], task.method_name, task.asked, str(shortage))
            return [Entry(row, [])]
        half = len(instances) // 2
        parts = instances[:half], instances[half:]
        return [entry for part in parts for entry in self._entries(task, part, method, referee)]

    def _at_once(self, task: Task, instances: list[int], method: Method, referee: Referee) -> list[Entry]:
        question, effort = task.asked.ask(instances, task.like), self._metered(task, len(instances))
        outcome = certify(task.network, referee, method, effort, question, clock=self.clock)
        predictions = referee.predictions(question) if task.asked.has_labels else None
        found = tally.rows_of(outcome, task.method_name, task.asked, predictions)
        rows = [_shown(row, task, referee) for row in found]
        layers = task.of_all_stages(tally.layer_sums(task.network, outcome, task.mesh)).tolist()
        return [Entry(row, sums) for row, sums in zip(rows, layers, strict=True)]

    def _metered(self, task: Task, size: int) -> Effort:
        """The task's effort, which tells how far the analysis of a batch of ``size`` instances is."""
        if (pace := self.pace) is None:
            return task.effort
        pace.begin_batch()
        return replace(task.effort, progress=ProgressMeter(lambda share: pace.analyse(size, share)))

    def _decided(self, entries: list[Entry]) -> None:
        if self.prepared.assignment.leads:
            self.ledger.add(entries)
            for entry in entries:
                self._tell(entry)
        if self.pace is not None:
            self.pace.decide(len(entries))

    def _tell(self, entry: Entry) -> None:
        if self.prepared.assignment.leads:
            self.context.report.bound(entry.row)


def _shown(row: BoundsRow, task: Task, referee: Referee) -> BoundsRow:
    """With the outputs at the counterexample, where there is one; all ranks that bound the instance call it."""
    if row.counterexample is None:
        return row
    x = torch.tensor(row.counterexample, dtype=torch.float64, device=task.device)
    return tally.at_counterexample(row, referee.outputs(x))
