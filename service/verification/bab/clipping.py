"""Shrinks boxes by the conditions that a counterexample in them must satisfy (Clip-and-Verify, Zhou et al., 2025).

A plane below a row that must not be positive cuts off the part of the box where the plane is. With several rows all
parts are cut off; with several disjuncts a counterexample may be in any of their boxes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.verification.bab.specification import Specification
from service.verification.verdict import ABSOLUTE_MARGIN, RELATIVE_MARGIN


@dataclass(frozen=True, eq=False)
class LinearCut:
    """``coefficients · x + bias ≤ rows · y − thresholds``, less what rounding may explain: ``(batch, rows, …)``."""

    coefficients: Tensor
    bias: Tensor

    @staticmethod
    def of(specification: Specification, box: Interval, coefficients: Tensor, bias: Tensor) -> LinearCut:
        """Return the cuts by planes below ``rows · y``, with the certificates' margin for rounding, in this type."""
        thresholds = specification.thresholds.to(bias.dtype)
        if specification.input_rows is not None:
            coefficients = coefficients + specification.input_rows.to(bias.dtype)
        reach = torch.maximum(box.lower.abs(), box.upper.abs()).unsqueeze(1)
        size = (coefficients.abs() * reach).sum(dim=2) + bias.abs() + thresholds.abs()
        slack = ABSOLUTE_MARGIN[bias.dtype] + RELATIVE_MARGIN[bias.dtype] * size
        return LinearCut(coefficients, _unless_undefined(bias - thresholds - slack))

    def least(self, box: Interval) -> Tensor:
        centre, radius = box.centre.unsqueeze(1), box.radius.unsqueeze(1)
        value = (self.coefficients * centre).sum(dim=2) - (self.coefficients.abs() * radius).sum(dim=2) + self.bias
        return _unless_undefined(value)


def _unless_undefined(bounds: Tensor) -> Tensor:
    """Return lower bounds with −inf in place of NaN: nothing is known there."""
    return bounds.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def clipped(
    specification: Specification, cut: LinearCut, box: Interval, left: Tensor, rounds: int
) -> tuple[Interval, Tensor, Tensor]:
    """Return a smaller box, the margins ``(batch, disjuncts)`` in all of the box, and the disjuncts left to prove
    there, after ``rounds`` of cutting.

    A margin is proved for what was cut off, too: where a disjunct is empty that way, it is 0.
    """
    margins = specification.per_disjunct(cut.least(box))
    for _ in range(rounds):
        smaller, empty = _once(specification, cut, box, left)
        left = left & ~(margins > 0) & ~empty
        inside = torch.maximum(margins, specification.per_disjunct(cut.least(smaller)))
        left = left & ~(inside > 0)
        margins = torch.where(left, inside, margins.clamp(min=0))
        box = smaller
    return box, margins, left


def _once(specification: Specification, cut: LinearCut, box: Interval, left: Tensor) -> tuple[Interval, Tensor]:
    least, slope = cut.least(box).unsqueeze(2), cut.coefficients
    lower, upper = box.lower.unsqueeze(1), box.upper.unsqueeze(1)
    # From the corner with the least value, the distance along one input until the plane is positive.
    reach = -least / slope.abs().clamp(min=torch.finfo(slope.dtype).tiny)
    reach = reach * (1 + RELATIVE_MARGIN[slope.dtype]) + 4 * torch.finfo(slope.dtype).eps * (lower.abs() + upper.abs())
    reach = torch.where(least.isfinite(), reach, torch.inf)
    highest = torch.where(slope > 0, torch.minimum(upper, lower + reach), upper)
    lowest = torch.where(slope < 0, torch.maximum(lower, upper - reach), lower)
    highest, lowest = _of_disjuncts(specification, highest, "amin"), _of_disjuncts(specification, lowest, "amax")
    empty = (lowest > highest).any(dim=2) & left
    open_ = (left & ~empty).unsqueeze(2)
    least_end = torch.where(open_, lowest, torch.inf).amin(dim=1)
    greatest_end = torch.where(open_, highest, -torch.inf).amax(dim=1)
    some = open_.any(dim=1)
    return Interval(torch.where(some, least_end, box.lower), torch.where(some, greatest_end, box.upper)), empty


def _of_disjuncts(specification: Specification, ends: Tensor, which: str) -> Tensor:
    """Combine ``(batch, rows, features)`` to ``(batch, disjuncts, features)``: all rows of a disjunct hold at once."""
    if specification.disjunct_count == ends.shape[1]:
        return ends[:, specification.disjunct.argsort()]
    index = specification.disjunct[None, :, None].expand_as(ends)
    start = ends.new_full(
        (ends.shape[0], specification.disjunct_count, ends.shape[2]), torch.inf if which == "amin" else -torch.inf
    )
    return start.scatter_reduce(1, index, ends, which)
