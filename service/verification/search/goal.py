"""A box with the disjuncts that a counterexample in it may satisfy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from service.bounds.ball import Ball
from service.bounds.interval import Interval
from service.jobs.vnnlib import Case, Halfspace, Query, Within
from service.verification.certify import ABSOLUTE_MARGIN, RELATIVE_MARGIN


@dataclass(frozen=True, eq=False)
class Goal:
    """A counterexample has ``rows · y ≤ thresholds`` for all rows of one disjunct, float64.

    ``rows`` ``(rows, outputs)``; ``disjunct`` ``(rows,)`` numbers the disjunct of each row, from 0 without gaps.
    ``lower``, ``upper`` ``(features,)`` are the exact ends of the box; with ``distance``, it is also at most that far
    from ``middle`` ``(features,)``.
    """

    lower: Tensor
    upper: Tensor
    rows: Tensor
    thresholds: Tensor
    disjunct: Tensor
    middle: Tensor
    distance: float | None = None

    def on(self, device: torch.device) -> Goal:
        places = (each.to(device) for each in (self.lower, self.upper, self.rows, self.thresholds, self.disjunct))
        lower, upper, rows, thresholds, disjunct = places
        return Goal(lower, upper, rows, thresholds, disjunct, self.middle.to(device), self.distance)

    @cached_property
    def disjuncts(self) -> int:
        return int(self.disjunct.max()) + 1

    def box(self, dtype: torch.dtype) -> Interval:
        """The set of inputs, as one instance."""
        if self.distance is not None:
            return Ball.within(self.middle[None], self.distance, dtype)
        return Interval.enclosing(self.lower[None], self.upper[None], dtype)

    def nearest(self, x: Tensor) -> Tensor:
        """Float64 inputs ``(n, features)`` moved into the exact set."""
        if self.distance is not None:
            away = x - self.middle
            # A little less than the distance: no rounding of the sum may lead outside.
            rounding = torch.finfo(x.dtype).eps * (self.middle.norm() + self.distance)
            room = (self.distance * (1 - 1e-12) - rounding).clamp(min=0)
            share = (room / away.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1)
            x = self.middle + share * away
        return torch.minimum(torch.maximum(x, self.lower), self.upper)

    def excess(self, outputs: Tensor) -> Tensor:
        """``rows · y − thresholds`` of outputs ``(n, outputs)``: ``(n, rows)``."""
        return outputs @ self.rows.to(outputs.dtype).T - self.thresholds.to(outputs.dtype)

    def offsets(self, least: Tensor, most: Tensor) -> Tensor:
        """What bounds ``(rows,)`` of ``rows · y`` must exceed: thresholds, and what rounding may explain.

        Where a bound is not finite, rounding may explain whatever can be told in this type.
        """
        dtype, largest = least.dtype, torch.finfo(least.dtype).max
        thresholds = self.thresholds.to(dtype)
        reach = torch.maximum(least.abs(), most.abs()).nan_to_num(nan=largest, posinf=largest) + thresholds.abs()
        return thresholds + ABSOLUTE_MARGIN[dtype] + RELATIVE_MARGIN[dtype] * reach

    def per_disjunct(self, values: Tensor) -> Tensor:
        """The largest of each disjunct's rows, ``(n, rows)`` to ``(n, disjuncts)``: all rows must be ≤ 0 at once."""
        index = self.disjunct.expand(len(values), -1)
        start = values.new_full((len(values), self.disjuncts), -torch.inf)
        return start.scatter_reduce(1, index, values, "amax")


def goals(query: Query, device: torch.device) -> list[Goal]:
    """One goal for each different box."""
    grouped: dict[tuple[tuple[float, ...], tuple[float, ...]], list[Case]] = {}
    for case in query.cases:
        grouped.setdefault((case.lower, case.upper), []).append(case)
    found = (_goal(lower, upper, cases, query.outputs, query.within) for (lower, upper), cases in grouped.items())
    return [each.on(device) for each in found]


def _goal(
    lower: Sequence[float], upper: Sequence[float], cases: Sequence[Case], outputs: int, within: Within | None
) -> Goal:
    # A case without halfspaces asks for any output: a row of zeros is always satisfied.
    flat = [(index, each) for index, case in enumerate(cases) for each in case.halfspaces or (Halfspace((), 0.0),)]
    rows = torch.zeros(len(flat), outputs, dtype=torch.float64)
    for row, (_, halfspace) in zip(rows, flat, strict=True):
        for output, factor in halfspace.coefficients:
            row[output] = factor
    exact = [torch.tensor(ends, dtype=torch.float64) for ends in (lower, upper)]
    thresholds = torch.tensor([halfspace.threshold for _, halfspace in flat], dtype=torch.float64)
    disjunct = torch.tensor([index for index, _ in flat])
    if within is None:
        return Goal(exact[0], exact[1], rows, thresholds, disjunct, (exact[0] + exact[1]) / 2)
    middle = torch.tensor(within.middle, dtype=torch.float64)
    return Goal(exact[0], exact[1], rows, thresholds, disjunct, middle, within.distance)
