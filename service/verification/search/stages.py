"""Searches through a model in pipeline stages: every stage has the same domains, and they bound them together.

What is decided is decided from numbers that the stages have from one of them. Inputs and activations are split as
everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.methods import METHODS, Effort
from service.bounds.planes import Known, Planes, minimum
from service.bounds.rigorous import RIGOROUS
from service.bounds.split import Sites
from service.bounds.stages import Staged, StagedAnalysis
from service.verification.certify import Verdict
from service.verification.search.activations import split_activations
from service.verification.search.bounder import Rigorously
from service.verification.search.decision import Finding, Moment, Watcher
from service.verification.search.goal import Goal
from service.verification.search.subject import Subject

COPIES = 64
"""Of the widest value, that a box takes in a stage."""
TIGHTER = {"crown": "alpha-crown"}


@dataclass(frozen=True, eq=False)
class ByStages:
    """A :class:`~service.verification.search.bounder.Bounder` that all stages call."""

    staged: Staged
    method: str

    @property
    def entries(self) -> int:
        return self.staged.widest * COPIES

    @torch.no_grad()
    def planes(self, box: Interval, known: Known, rows: Tensor) -> Planes:
        line, nothing = self.staged.line, box.lower.new_zeros(1, 1, box.lower.shape[1])
        watched = _Watched(box.lower, box.upper, [])
        analysis = self.staged.method(METHODS[self.method])(self.staged.network, watched, Effort())
        watched.arrived.clear()
        least = self.staged.network.exchange.agree(analysis.lower_bounds(rows.unsqueeze(0)))
        coefficients = line.of_first(self._slopes(watched.arrived, least, nothing) if line.is_first else None)
        return Planes(coefficients, least - minimum(box, coefficients, torch.zeros_like(least)), {}, nothing)

    def _slopes(self, arrived: list[Tensor], least: Tensor, nothing: Tensor) -> Tensor:
        """Coefficients ``(batch, rows, features)`` of all rows at the input; zeros where their order is not known."""
        exchange, (batch, rows) = self.staged.network.exchange, least.shape
        flat = [exchange.gather(each.flatten(2).expand(batch, -1, -1), 1) for each in arrived]
        # Tensor-parallel ranks have shares of rows that are filled up to as many on each, part by part.
        if len(flat) == 1 or (flat and exchange.axis.size == 1):
            return exchange.agree(torch.cat(flat, dim=1)[:, :rows])
        return nothing.expand(batch, rows, -1)


def rigorously_by_stages(staged: Staged, method: str) -> Rigorously:
    """The same for boxes of float64, with planes that lie below in real arithmetic."""

    def analyse(box: Interval) -> StagedAnalysis:
        analysis = staged.method(RIGOROUS[method])(staged.network, box, Effort())
        assert isinstance(analysis, StagedAnalysis)
        return analysis

    return Rigorously(analyse, ByStages(staged, method), staged.entries * staged.widest)


@dataclass(frozen=True, eq=False)
class _Watched(Interval):
    """Keeps the coefficients ``(batch or 1, rows, *shape)`` that it was asked about."""

    arrived: list[Tensor]

    def arranged(self, function: Callable[[Tensor], Tensor]) -> _Watched:
        return _Watched(function(self.lower), function(self.upper), self.arrived)

    def least(self, coefficients: Tensor) -> Tensor:
        self.arrived.append(coefficients)
        return super().least(coefficients)


def split_in_stages(subject: Subject, goal: Goal, method: str, deadline: float, watcher: Watcher) -> Finding:
    """:func:`split_activations`; the whole box is all that is bounded where a stage has no activations."""
    assert subject.staged is not None
    found = subject.staged.line.joined(torch.tensor([Sites.of(subject.network).entries]))
    search = split_activations if bool(found.all()) else _bound_whole
    return search(subject, goal, method, deadline, watcher)


@torch.no_grad()
def _bound_whole(subject: Subject, goal: Goal, method: str, deadline: float, watcher: Watcher) -> Finding:
    """One domain for each disjunct: the whole box."""
    assert subject.staged is not None
    staged, box, bound = subject.staged, goal.box(subject.dtype), -inf
    rows = goal.rows.to(subject.dtype)
    for name in (method, TIGHTER.get(method)):
        if name is None or bound > 0 or subject.late(deadline):
            continue
        method_of_stages = (RIGOROUS if subject.rigorous else METHODS)[name]
        analysis = staged.method(method_of_stages)(staged.network, box, subject.effort)
        below = staged.network.exchange.agree(analysis.lower_bounds(torch.cat([rows, -rows]).unsqueeze(0)))
        bound = max(bound, _least_margin(goal, below[0]))
    watcher(Moment(goal.disjuncts, 0 if bound > 0 else goal.disjuncts, bound))
    return Finding(Verdict.VERIFIED if bound > 0 else Verdict.UNKNOWN, None, goal.disjuncts, bound)


def _least_margin(goal: Goal, both: Tensor) -> float:
    """Over the disjuncts, of the best of their rows; ``both`` bounds the rows and their negations from below."""
    least, most = both.chunk(2)
    margins = (least - goal.offsets(least, -most)).nan_to_num(nan=-torch.inf)
    return float(goal.per_disjunct(margins.unsqueeze(0)).min())
