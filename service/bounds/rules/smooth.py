"""Relaxations of any smooth function of one variable, from its derivative and the derivative's turning points.

Slopes are a choice and only decide how tight a line is. Given a slope k, the intercept is *computed*: the extremum
of f(z) − k·z over the interval, which lies at an end or where f′(z) = k, at most once between turning points of f′.
So any slope, also an optimised one, gives a sound line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.relaxation import Relaxation
from service.bounds.rules.base import NonlinearRule

UNIFORM_POINTS = 8
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Smooth(NonlinearRule):
    """``function`` with its ``derivative``.

    ``stationary`` are the zeros of the derivative, ``turning`` the points where the derivative stops rising or
    falling (inflections of the function); both complete and ascending. ``knots`` are extra abscissae at which the
    function bends, used only to choose slopes. ``accepts`` refuses a node by its arguments. ``defined`` tells which
    intervals lie in the function's domain (all, when it is absent): others have no finite bounds, since the function
    may have no value there. ``inside`` is a point of the domain.
    """

    function: Function
    derivative: Function
    stationary: tuple[float, ...] = ()
    turning: tuple[float, ...] = ()
    knots: tuple[float, ...] = ()
    accepts: Callable[[Node], str | None] = lambda node: None
    defined: Callable[[Interval], Tensor] | None = None
    inside: float = 0.0

    def refusal(self, node: Node) -> str | None:
        return super().refusal(node) or self.accepts(node)

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        return self.range(inputs[0])

    def range(self, bounds: Interval) -> Interval:
        """Least and greatest value: at the ends, or at a stationary point within."""
        if self.defined is not None:
            usable = self.defined(bounds)
            found = self._range(self._where(usable, bounds))
            return Interval(torch.where(usable, found.lower, -torch.inf), torch.where(usable, found.upper, torch.inf))
        return self._range(bounds)

    def _range(self, bounds: Interval) -> Interval:
        at = [bounds.lower, bounds.upper, *(_clamped(point, bounds) for point in self.stationary)]
        values = torch.stack([self.function(point) for point in at])
        return Interval(values.amin(dim=0), values.amax(dim=0))

    def _where(self, usable: Tensor, bounds: Interval) -> Interval:
        """``bounds``, or a point at which everything has a value."""
        return bounds.map(lambda end: torch.where(usable, end, torch.full_like(end, self.inside)))

    def improvable(self, node: Node, bounds: Interval) -> Tensor:
        return bounds.upper > bounds.lower

    def _usable(self, bounds: Interval) -> Tensor:
        finite = bounds.lower.isfinite() & bounds.upper.isfinite()
        return finite if self.defined is None else finite & self.defined(bounds)

    def relax(self, node: Node, bounds: Interval) -> Relaxation:
        lower_slope, upper_slope = self._slopes(self._where(self._usable(bounds), bounds))
        return self.with_slopes(bounds, lower_slope, upper_slope)

    def with_slopes(self, bounds: Interval, lower_slope: Tensor, upper_slope: Tensor) -> Relaxation:
        """The tightest lines of these slopes, moved outwards by what rounding may have cost.

        On an infinite interval the lines are the ends of the function's range.
        """
        finite = self._usable(bounds)
        zero = torch.zeros_like(bounds.lower)
        inside = self._where(finite, bounds)
        lower_slope, upper_slope = torch.where(finite, lower_slope, zero), torch.where(finite, upper_slope, zero)
        span = self.range(bounds)
        return Relaxation(
            lower_slope=lower_slope,
            upper_slope=upper_slope,
            lower_intercept=torch.where(finite, -self._greatest(inside, lower_slope, -1), span.lower),
            upper_intercept=torch.where(finite, self._greatest(inside, upper_slope, 1), span.upper),
        )

    def _greatest(self, bounds: Interval, slope: Tensor, sign: int) -> Tensor:
        """An upper bound of ``sign·(f(z) − slope·z)`` over the interval."""

        def height(z: Tensor) -> Tensor:
            return sign * (self.function(z) - slope * z)

        best = torch.maximum(height(bounds.lower), height(bounds.upper))
        edges = [bounds.lower, *(_clamped(point, bounds) for point in self.turning), bounds.upper]
        for start, end in pairwise(edges):
            low, high = self._bracket(start, end, slope)
            # f′ is monotone here, so between the bracket's ends the height rises by at most |f′ − k| times its width.
            steepness = torch.maximum((self.derivative(low) - slope).abs(), (self.derivative(high) - slope).abs())
            best = torch.maximum(best, torch.maximum(height(low), height(high)) + steepness * (high - low))
        reach = torch.maximum(bounds.lower.abs(), bounds.upper.abs())
        size = self.function(bounds.lower).abs() + self.function(bounds.upper).abs() + best.abs() + slope.abs() * reach
        return best + 4 * torch.finfo(best.dtype).eps * size

    def _bracket(self, start: Tensor, end: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Bisect for f′(z) = slope between two points; without a solution the bracket shrinks to an end."""
        rising = self.derivative(start) < slope
        low, high = start, end
        for _ in range(_bisections(start.dtype)):
            middle = low / 2 + high / 2
            before = (self.derivative(middle) < slope) == rising
            low, high = torch.where(before, middle, low), torch.where(before, high, middle)
        return low, high

    def _slopes(self, bounds: Interval) -> tuple[Tensor, Tensor]:
        """Slopes of the convex and the concave envelope at the interval's middle, over sampled points.

        A line of minimal mean distance touches the envelope there.
        """
        points = self._points(bounds)
        values = self.function(points)
        middle = bounds.centre
        tangent = self.derivative(middle)
        lowest, highest = torch.full_like(middle, torch.inf), torch.full_like(middle, -torch.inf)
        lower_slope, upper_slope = tangent, tangent
        smallest = 16 * torch.finfo(middle.dtype).eps * torch.maximum(bounds.lower.abs(), bounds.upper.abs())
        for point, value in zip(points, values, strict=True):
            run = points - point
            # Divided by 1 where there is no chord: 0/0 would leave no gradient even where it is not taken.
            chord = (values - value) / torch.where(run > smallest, run, torch.ones_like(run))
            usable = (point <= middle) & (points >= middle) & (run > smallest)
            at_middle = value + chord * (middle - point)
            below, index = torch.where(usable, at_middle, torch.inf).min(dim=0)
            lower_slope = torch.where(below < lowest, _pick(chord, index), lower_slope)
            above, index = torch.where(usable, at_middle, -torch.inf).max(dim=0)
            upper_slope = torch.where(above > highest, _pick(chord, index), upper_slope)
            lowest, highest = torch.minimum(lowest, below), torch.maximum(highest, above)
        return lower_slope, upper_slope

    def _points(self, bounds: Interval) -> Tensor:
        """``(points, batch, *shape)``: evenly spread, and where the function bends."""
        fractions = torch.linspace(0, 1, UNIFORM_POINTS).tolist()
        spread = [bounds.lower * (1 - fraction) + bounds.upper * fraction for fraction in fractions]
        return torch.stack([*spread, *(_clamped(point, bounds) for point in self.knots)])


def _clamped(point: float, bounds: Interval) -> Tensor:
    return torch.full_like(bounds.lower, point).clamp(min=bounds.lower, max=bounds.upper)


def _pick(table: Tensor, index: Tensor) -> Tensor:
    return table.gather(0, index.unsqueeze(0)).squeeze(0)


def _bisections(dtype: torch.dtype) -> int:
    return 48 if dtype == torch.float64 else 24
