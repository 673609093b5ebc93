"""Defines interval bounds: a box of values, and its propagation through a network (IBP, Gowal et al., 2018)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds import fused
from service.bounds.flat import by_instance, by_row

ORDINARY = 2.0**10
"""A size of values next to which decisive values are rarely small enough to be hidden by rounding."""


@dataclass(frozen=True, eq=False)
class Interval:
    """``lower ≤ value ≤ upper`` entrywise, both ``(batch, *shape)``.

    ``exact_layers`` is the number of operators that mix entries after which interval propagation from it is still
    exact. A value that is partial over a tensor-parallel group has partial bounds: the ranks' intervals sum to the
    whole's.
    """

    lower: Tensor
    upper: Tensor
    exact_layers: ClassVar[int] = 1

    @property
    def centre(self) -> Tensor:
        return torch.add(self.lower / 2, self.upper, alpha=0.5)  # halved: the sum of two large bounds may overflow

    @property
    def radius(self) -> Tensor:
        return torch.sub(self.upper / 2, self.lower, alpha=0.5)

    @property
    def spread(self) -> Tensor:
        return self.centred[1]

    @property
    def centred(self) -> tuple[Tensor, Tensor]:
        """Return the centre, and the spread: the radius with the rounding error of a sum over the entries, since values
        may be small next to the terms.

        The margins of verdicts cover terms of up to :data:`ORDINARY`. Bounds in training prove nothing, and
        omit the error.
        """
        radius, centre = self.radius, self.centre
        if radius.requires_grad:
            return centre, radius
        large = functional.softshrink(radius + centre.abs(), ORDINARY)  # what goes beyond that
        return centre, torch.add(radius, large, alpha=2 * torch.finfo(radius.dtype).eps)

    @property
    def width(self) -> Tensor:
        return self.upper - self.lower

    def map(self, function: Callable[[Tensor], Tensor]) -> Interval:
        """Apply a function that keeps order, or only moves entries around."""
        return Interval(function(self.lower), function(self.upper))

    def meet(self, other: Interval) -> Interval:
        """Return the intersection. Both contain the value, so ends can cross only by rounding, and are swapped back."""
        lower, upper = torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper)
        return Interval(torch.minimum(lower, upper), torch.maximum(lower, upper))

    def without_nan(self) -> Interval:
        """Replace NaN by infinity: NaN compares false with everything, so a rule would take its sign for known.

        An end that overflowed towards the other becomes the largest number, since values are finite.
        """
        return Interval(
            self.lower.nan_to_num(nan=-torch.inf, neginf=-torch.inf),
            self.upper.nan_to_num(nan=torch.inf, posinf=torch.inf),
        )

    @cached_property
    def outward(self) -> Interval:
        """Return the ends from the centre and the spread."""
        return Interval.around(*self.centred)

    def arranged(self, function: Callable[[Tensor], Tensor]) -> Interval:
        """Apply a function that only moves entries or instances around: the set of values stays the same."""
        return self.map(function)

    def nearest(self, values: Tensor) -> Tensor:
        """Return values ``(batch, *shape)`` moved to the nearest ones in the set."""
        return torch.minimum(torch.maximum(values, self.lower), self.upper)

    def minimiser(self, coefficients: Tensor) -> Tensor:
        """Return the values ``(batch, *shape)`` of the set at which ``coefficients · v`` is least; the middle of those
        that a coefficient of 0 leaves open.
        """
        return torch.where(coefficients > 0, self.lower, torch.where(coefficients < 0, self.upper, self.centre))

    def descended(self, values: Tensor, gradient: Tensor, share: Tensor | float) -> Tensor:
        """Return values ``(batch, *shape)`` of the set after the step down a function of this gradient that is steepest
        for its length, a ``share`` of the set's width.
        """
        return self.nearest(values - share * (self.minimiser(-gradient) - self.minimiser(gradient)))

    def least(self, coefficients: Tensor) -> Tensor:
        """Return the least value of ``coefficients · v`` over the set, ``(batch, rows)``.

        ``coefficients`` is ``(batch or 1, rows, *shape)``.
        """
        if self.lower.requires_grad or self.upper.requires_grad:
            return fused.least(by_row(coefficients), by_instance(self.centre), by_instance(self.radius))
        return fused.least(by_row(coefficients), *self._middle)

    @cached_property
    def _middle(self) -> tuple[Tensor, Tensor]:
        """Return the centre and the spread, flattened: every pass asks for them."""
        centre, spread = self.centred
        return by_instance(centre), by_instance(spread)

    @staticmethod
    def around(centre: Tensor, radius: Tensor) -> Interval:
        """Return ``centre ± radius``, and everything where the centre, which may be a sum, is infinite: after an
        early overflow its sign is unknown.
        """
        return Interval(
            (centre - radius).nan_to_num_(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf),
            (centre + radius).nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=torch.inf),
        )

    @staticmethod
    def summed(lower: Tensor, upper: Tensor) -> Interval:
        """Return the interval of ends that are sums; an infinite end, which may have overflowed early, becomes NaN."""
        return Interval(torch.add(lower, lower, alpha=0), torch.add(upper, upper, alpha=0))

    @staticmethod
    def enclosing(lower: Tensor, upper: Tensor, dtype: torch.dtype) -> Interval:
        """Return the smallest interval of ``dtype`` around float64 ends: rounded outwards."""
        low, high = lower.to(dtype), upper.to(dtype)
        below, above = torch.full_like(low, -torch.inf), torch.full_like(high, torch.inf)
        return Interval(
            torch.where(low.double() > lower, torch.nextafter(low, below), low),
            torch.where(high.double() < upper, torch.nextafter(high, above), high),
        )

    @staticmethod
    def about(middle: Tensor, distance: float) -> Interval:
        """Return the smallest interval that holds the real ends ``middle ± distance`` of float64 points."""
        return Interval(-sum_above(-middle, distance), sum_above(middle, distance))

    @staticmethod
    def point(value: Tensor) -> Interval:
        return Interval(value, value)


def sum_above(values: Tensor, more: float) -> Tensor:
    """Return ``values + more`` of float64 numbers, rounded up: the sum's own error is known (Knuth, 1998, section
    4.2.2).
    """
    total = values + more
    back = total - values
    error = (values - (total - back)) + (more - back)
    return torch.where(error > 0, torch.nextafter(total, torch.full_like(total, torch.inf)), total)
