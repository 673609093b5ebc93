"""The verification job: certify a property of a model, on this rank of a mesh."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from service.jobs.runtime import RunContext
from service.jobs.spec.verify import VerifySpec
from service.parallel import distributed
from service.parallel.collectives import max_over_group, reduce_from_group
from service.verification import report, tally
from service.verification.certify import certify
from service.verification.clock import PHASES, Clock, peak_memory_gib
from service.verification.ledger import Entry, Ledger
from service.verification.searching import Searches, StoppedError
from service.verification.task import Task, make
from service.verification.witness import Referee


def run(spec: VerifySpec, context: RunContext) -> dict[str, Any] | None:
    """Bound every instance, reporting rows as they are found; rank 0 returns the result.

    Tensor-parallel ranks bound the same instances together, data-parallel ranks different ones. What an earlier
    attempt decided is not done again. Raises :class:`UnsupportedModelError` or ``PropertyError`` before any bounding
    when the model or the property cannot be done.
    """
    started = time.monotonic()
    # A last bit of float32 decides nothing here, but TF32's ten-bit products would.
    torch.set_float32_matmul_precision("highest")
    device = distributed.start(context.device_type)
    clock = Clock(device)
    with clock.phase("prepare"):
        task = make(spec, context, device)
    context.report.log(f"{task.asked.count} instances by {task.method_name} on {spec.parallel.arithmetic} ranks")
    own = _Own(task, context, clock)
    own.run()
    spent = _over_ranks(task, torch.tensor(list(clock.seconds.values()), dtype=torch.float64))
    memory = _most(task, peak_memory_gib(device))
    if context.rank != 0:
        return None
    entries = sorted(own.ledger.everything().values(), key=lambda entry: entry.instance)
    rows = [entry.row for entry in entries]
    context.report.artifact(report.write(rows, context.paths.artifacts), report.MEDIA_TYPE)
    return {
        **tally.summary(rows, task.asked.has_labels, task.asked.eps),
        "method": task.method_name,
        "layers": tally.layer_means(task.layers, entries),
        "time": dict(zip(PHASES, spent, strict=True)),
        "memory_gib": memory,
        "wall_seconds": time.monotonic() - started,
    }


@dataclass(eq=False)
class _Own:
    """The instances of this rank, on the way from open to decided."""

    task: Task
    context: RunContext
    clock: Clock
    ledger: Ledger = field(init=False)
    done: int = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.context.paths.checkpoints, self.context.attempt, self.task.mesh.dp.rank)

    def run(self) -> None:
        """Until every instance is decided or the attempt is asked to end."""
        decided = self._resumed()
        referee = Referee(self.task.module, self.task.network.exchange, self.task.runtime)
        searches = Searches(self.task, self.context, self.clock)
        for instances in self.task.batches(without=decided):
            # A group stops as one: its ranks would otherwise wait for each other in a collective.
            if self.task.anywhere(self.context.should_stop()):
                return
            waiting = self._bounded(instances, referee, searches)
            try:
                for entry in waiting:
                    self._decided([Entry(searches.decided(entry.row), entry.layers)])
            except StoppedError:
                return

    def _resumed(self) -> set[int]:
        """Instances that all ranks know as decided. Their rows are told again: the last ones may not have arrived."""
        earlier = self.ledger.earlier()
        known = torch.zeros(self.task.asked.count, dtype=torch.float64)
        known[list(earlier)] = 1
        decided = {index for index, share in enumerate(_over_ranks(self.task, known)) if share == 1}
        own = [earlier[instance] for instance in self.task.own if instance in decided]
        for entry in own:
            self._tell(entry)
        self._progress(len(own))
        if decided and self.context.rank == 0:
            self.context.report.log(f"{len(decided)} instances were decided by an earlier attempt")
        return decided

    def _bounded(self, instances: list[int], referee: Referee, searches: Searches) -> list[Entry]:
        """Bound a batch; what is left for a search is returned, the rest is decided."""
        task, begun = self.task, time.time()
        question = task.asked.ask(instances, task.like)
        outcome = certify(task.network, referee, task.method, task.effort, question, clock=self.clock)
        self.context.report.span("bound", begun, time.time(), {"instances": len(instances)})
        rows = tally.rows_of(outcome, task.method_name, task.asked)
        layers = task.of_all_stages(tally.layer_sums(task.network, outcome, task.mesh)).tolist()
        entries = [Entry(row, sums) for row, sums in zip(rows, layers, strict=True)]
        waiting = [entry for entry in entries if task.crew.anywhere(searches.wants(entry.row), task.device)]
        self._decided([entry for entry in entries if entry not in waiting])
        return waiting

    def _decided(self, entries: list[Entry]) -> None:
        if self.task.leads:
            self.ledger.add(entries)
            for entry in entries:
                self._tell(entry)
        self._progress(len(entries))

    def _tell(self, entry: Entry) -> None:
        if self.task.leads:
            self.context.report.bound(entry.row)

    def _progress(self, more: int) -> None:
        self.done += more
        if more and self.context.rank == 0:
            total = self.task.asked.count
            self.context.report.progress(min(self.done * self.task.groups, total), total, "instances")


def _over_ranks(task: Task, values: Tensor) -> list[float]:
    """The mean over all ranks; every rank calls it, and goes on when all have."""
    mesh, total = task.mesh, values.to(task.device)
    for axis in (mesh.tp, mesh.dp, mesh.pp):
        total = reduce_from_group(total, axis.group) / axis.size
    found: list[float] = total.tolist()
    return found


def _most(task: Task, value: float) -> float:
    """Of all ranks; every rank calls it."""
    most = torch.tensor([value], dtype=torch.float64, device=task.device)
    for axis in (task.mesh.tp, task.mesh.dp, task.mesh.pp):
        most = max_over_group(most, axis.group)
    return float(most)
