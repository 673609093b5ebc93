"""Guards plain verdicts against rounding: a row is *verified* only if its proved margin is larger than rounding may
explain.

The bounds' graph in float32 is compared with the model in float64, at inputs of the instance's own box. Where large
terms cancel, where exponentials overflow and where steps are taken, the two differ by more than the size of the
outputs suggests. A doubtful verdict is decided again in float64; if it stays doubtful, it is unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite

import torch
from torch import Tensor, nn

from service.bounds.flat import by_instance
from service.bounds.graph_module import ExecutableGraph
from service.bounds.network import prepare
from service.bounds.progress import OutOfTimeError
from service.formats.vnnlib import Query
from service.jobs.events import BoundsRow
from service.verification.certify import certify
from service.verification.counterexamples import CounterexampleChecker
from service.verification.engine import NetworkEngine
from service.verification.engine.base import PLAIN_DOUBLE
from service.verification.load.model_file import within
from service.verification.results import leave_undecided
from service.verification.search_runner import BY_QUERY
from service.verification.task import Task, method_of
from service.verification.verdict import ABSOLUTE_MARGIN, RELATIVE_MARGIN, Verdict

POINTS, FACTOR = 16, 4
"""The number of compared inputs, and the factor by which rounding may be worse elsewhere."""
REASON = "rounding may explain what was proved; rigorous: true may decide this"

Search = Callable[[Task, CounterexampleChecker, BoundsRow], BoundsRow]


@dataclass(eq=False)
class RoundingGuard:
    """Checks the verified rows of one task; all ranks that bound them call it. ``search`` decides where bounds
    do not, given the task and the checker in float64.
    """

    task: Task
    checker: CounterexampleChecker
    search: Search

    def settled(self, row: BoundsRow, limit: float = inf) -> BoundsRow:
        """Return the row, or the row that float64 gives if rounding may explain its verdict, within ``limit``
        seconds in all.
        """
        started = time.monotonic()
        found = self._settle_row(row, started + limit - row.seconds)
        return replace(found, seconds=row.seconds + time.monotonic() - started)

    @torch.no_grad()
    def _settle_row(self, row: BoundsRow, deadline: float) -> BoundsRow:
        query = self.task.asked.query(row.instance)
        if row.verdict != Verdict.VERIFIED.value or query is None or self.task.like.dtype != torch.float32:
            return row
        if row.decided_by == BY_QUERY:
            return row
        rounding, allowed = self._rounding(self._bounded, row.instance, query)
        if rounding <= allowed or rounding < _margin(row):
            return row
        if self._double is None:
            return leave_undecided(row, REASON)
        # Bounds in float64 lose almost nothing; the rest is the rounding of the model itself in float32.
        rounding, _ = self._rounding(self.task.module, row.instance, query)
        try:
            again = self._again(row, rounding, deadline)
        except OutOfTimeError:
            return leave_undecided(row, REASON)
        holds = again.verdict != Verdict.VERIFIED.value or rounding < _margin(again)
        return again if holds else leave_undecided(again, REASON)

    def _rounding(self, computed: nn.Module, instance: int, query: Query) -> tuple[float, float]:
        """Return the most that rounding may cost a row of the query, and the amount that its margin allows for."""
        box, tp_group = self.task.asked.batch([instance], self.task.like).box, self.task.engine.network.tp_group
        x = within(box.lower, box.upper, POINTS, torch.Generator().manual_seed(instance))
        exact = tp_group.agree(self.checker.precise(x.double()))
        missed = (tp_group.agree(computed(x)).double() - exact).abs().nan_to_num(nan=inf).amax()
        size, weight = float(exact.abs().amax()), _largest_row(query)
        allowed = ABSOLUTE_MARGIN[torch.float32] + RELATIVE_MARGIN[torch.float32] * size * weight
        return FACTOR * weight * float(missed), allowed

    @cached_property
    def _bounded(self) -> nn.Module:
        """Return the bounded graph if this rank has all of it, otherwise the model."""
        engine = self.task.engine
        if not engine.is_alone:
            return self.task.module
        return _Flat(ExecutableGraph(engine.network.graph), engine.network.graph.input.shape)

    @cached_property
    def _double(self) -> tuple[Task, CounterexampleChecker] | None:
        """Return the task in float64, if no other rank would have to take part."""
        task = self.task
        if not task.is_alone:
            return None
        module, shape = self.checker.precise, task.engine.network.graph.input.shape
        engine = NetworkEngine(prepare(module, shape), PLAIN_DOUBLE, task.device)
        checker = CounterexampleChecker(module, engine.network.tp_group, task.runtime)
        return replace(task, module=module, engine=engine), checker

    def _again(self, row: BoundsRow, rounding: float, deadline: float) -> BoundsRow:
        """Return the verdict of bounds in float64, or of a search if these leave it open."""
        assert self._double is not None
        started, (task, checker) = time.monotonic(), self._double
        bounder = task.engine.bounder(method_of(task.spec))
        batch, options = task.asked.batch([row.instance], task.like), task.options.until(deadline)
        outcome = certify(task.engine, checker, bounder, options, batch)
        margin = float(outcome.margin[0])
        if isfinite(margin) and margin > rounding:
            return replace(row, margin=margin)
        open_ = replace(row, verdict=Verdict.UNKNOWN.value, margin=None, decided_by=None)
        return self.search(task, checker, replace(open_, seconds=row.seconds + time.monotonic() - started))


class _Flat(nn.Module):
    def __init__(self, graph: ExecutableGraph, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.graph, self.shape = graph, shape

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = by_instance(self.graph(x.reshape(-1, *self.shape)))
        return found


def _margin(row: BoundsRow) -> float:
    return -inf if row.margin is None else row.margin


def _largest_row(query: Query) -> float:
    """Return the largest sum of sizes of coefficients of a halfspace."""
    halfspaces = [each for disjunct in query.disjuncts for each in disjunct.halfspaces]
    return max((sum(abs(float(factor)) for _, factor in each.coefficients) for each in halfspaces), default=1.0)
