"""Lines and ranges of functions of one variable that hold in real arithmetic.

Slopes are given, as computed; only the intercept has to be right. Between inflection points a function is
convex or concave, and ``min f(z) − k z ≥ min(value at the ends, least of the tangent at any t)``: if it is convex the
tangent is below it, if it is concave the ends are lowest and the tangent is above them. So t may be found by a
bisection that rounds, and only the last evaluation needs an allowance.

Additions, multiplications, divisions and square roots round correctly; ``exp``, ``log``, ``sin``, ``cos``, ``tanh``,
``asinh``, ``erf``, ``erfc`` and ``pow`` stay within a few units of the last place on CPUs and on CUDA (SLEEF 1.5, the
CUDA libraries 5, by their documentation); 8 are allowed for here, and 16 for a derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import inf

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.relaxation import Relaxation
from service.bounds.rounding import TINY, UNIT, down

Function = Callable[[Tensor], Tensor]
Error = Callable[[Tensor, Tensor], Tensor]
"""Maps ``(z, computed)`` to the absolute error of the result computed at ``z``."""
BISECTIONS = 52


@dataclass(frozen=True, kw_only=True)
class CurveShape:
    """Facts of a function, which hold everywhere."""

    stationary: tuple[float, ...] = ()
    """The zeros of the derivative: all, ascending."""
    inflections: tuple[float, ...] = ()
    """The points where the derivative stops rising or falling: all, ascending."""
    least: float = -inf
    greatest: float = inf
    defined: Callable[[Interval], Tensor] | None = None
    """Tells which intervals lie in the domain, all if it is absent: others have no finite bounds."""
    inside: float = 0.0
    """A point of the domain."""
    first_tangent: float = -inf
    """Rigorous tangents are taken here or above."""


@dataclass(frozen=True)
class Curve(CurveShape):
    """A function with its evaluation's errors in float64; without a derivative, straight between ``inflections``."""

    function: Function
    value_error: Error
    derivative: Function | None = None
    slope_error: Error = lambda z, slope: torch.zeros_like(z)

    def range(self, bounds: Interval) -> Interval:
        """Return the least and the greatest value over each interval; infinite if the function may have none."""
        usable = self._usable(bounds, finite=False)
        inner = bounds.map(lambda end: torch.where(usable, end, torch.full_like(end, self.inside)))
        at = [inner.lower, inner.upper, *(within(point, inner) for point in self.stationary)]
        values = [(self.function(point), point) for point in at]
        errors = [self.value_error(point, value) for value, point in values]
        # An exact value must not move: a 0 that turns negative has no root.
        low = torch.stack([_less(value, error) for (value, _), error in zip(values, errors, strict=True)]).amin(dim=0)
        high = torch.stack([-_less(-value, error) for (value, _), error in zip(values, errors, strict=True)])
        low, high = low.clamp(min=self.least), high.amax(dim=0).clamp(max=self.greatest)
        return Interval(torch.where(usable, low, -torch.inf), torch.where(usable, high, torch.inf)).without_nan()

    def lines(self, bounds: Interval, lower_slope: Tensor, upper_slope: Tensor) -> Relaxation:
        """Return lines of these slopes, or the ends of the range if there can be no line."""
        usable = self._usable(bounds, finite=True) & lower_slope.isfinite() & upper_slope.isfinite()
        zero = torch.zeros_like(lower_slope)
        lower_slope, upper_slope = torch.where(usable, lower_slope, zero), torch.where(usable, upper_slope, zero)
        inner = bounds.map(lambda end: torch.where(usable, end, torch.full_like(end, self.inside)))
        span = self.range(bounds)
        return Relaxation(
            lower_slope=lower_slope,
            upper_slope=upper_slope,
            lower_intercept=torch.where(usable, self._least(inner, lower_slope, 1), span.lower),
            upper_intercept=torch.where(usable, -self._least(inner, upper_slope, -1), span.upper),
        )

    def _usable(self, bounds: Interval, finite: bool) -> Tensor:
        usable = bounds.lower <= bounds.upper
        if finite:
            usable = usable & bounds.lower.isfinite() & bounds.upper.isfinite()
        return usable if self.defined is None else usable & self.defined(bounds)

    def _least(self, bounds: Interval, slope: Tensor, sign: int) -> Tensor:
        """Return a lower bound of ``sign·(f(z) − slope·z)`` over the interval."""
        edges = [bounds.lower, *(within(point, bounds) for point in self.inflections), bounds.upper]
        least = torch.stack([self._height(edge, slope, sign) for edge in edges]).amin(dim=0)
        if self.derivative is None:
            return least
        for start, end in pairwise(edges):
            least = torch.minimum(least, self._tangent(self.derivative, start, end, slope, sign))
        return least

    def _height(self, z: Tensor, slope: Tensor, sign: int) -> Tensor:
        """Return at most ``sign·(f(z) − slope·z)``."""
        value, line = self.function(z), slope * z
        height = sign * (value - line)
        return down(height - (self.value_error(z, value) + 4 * UNIT * (line.abs() + height.abs()) + 4 * TINY))

    def _tangent(self, derivative: Function, start: Tensor, end: Tensor, slope: Tensor, sign: int) -> Tensor:
        """Return the least value over ``[start, end]`` of the height's tangent near the point at which the height is
        level.
        """
        point = _level(derivative, start, end, slope, sign).clamp(min=self.first_tangent)
        steep = derivative(point)
        rise = sign * (steep - slope)
        uncertain = self.slope_error(point, steep) + 2 * UNIT * rise.abs()
        reach = torch.maximum((point - start).abs(), (end - point).abs())
        falls = torch.minimum(rise * (start - point), rise * (end - point)).clamp(max=0)
        base = self._height(point, slope, sign)
        error = 2 * uncertain * reach + 8 * UNIT * (rise.abs() * reach + base.abs()) + 4 * TINY
        return down(base + falls - error)


def _level(derivative: Function, start: Tensor, end: Tensor, slope: Tensor, sign: int) -> Tensor:
    """Return about where a monotone derivative equals ``slope``, or the end at which the height is lowest if it
    nowhere does.
    """
    first, last = derivative(start) - slope, derivative(end) - slope
    rising = first < 0
    low, high = start.expand_as(rising), end.expand_as(rising)
    for _ in range(BISECTIONS):
        middle = low / 2 + high / 2
        before = (derivative(middle) < slope) == rising
        low, high = torch.where(before, middle, low), torch.where(before, high, middle)
    return torch.where(rising == (last < 0), torch.where(sign * first > 0, start, end), low / 2 + high / 2)


def _less(value: Tensor, error: Tensor) -> Tensor:
    """Return at most ``value − error``, and exactly ``value`` if there is no error."""
    return torch.where(error > 0, down(value - error), value)


@cache
def _on_device(points: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor, which is kept: a copy from the host waits for all pending work of a device."""
    with torch.inference_mode(False):  # later calls may need gradients
        return torch.tensor(points, dtype=dtype, device=device)


def all_within(points: tuple[float, ...], bounds: Interval) -> Tensor:
    """Return each point as :func:`within` does, ``(points, *shape)``."""
    lower, upper = bounds.lower, bounds.upper
    kept = _on_device(points, lower.dtype, lower.device)
    return kept.reshape(-1, *[1] * lower.ndim).clamp(min=lower, max=upper)


def with_ends(points: tuple[float, ...], bounds: Interval) -> Tensor:
    """Return :func:`all_within` of ascending points between the ends of the intervals, ``(points + 2, *shape)``."""
    if not points:
        return torch.stack([bounds.lower, bounds.upper])
    return torch.cat([bounds.lower.unsqueeze(0), all_within(points, bounds), bounds.upper.unsqueeze(0)])


def within(point: float, bounds: Interval) -> Tensor:
    """Return the point, or for each interval without it the end that is nearest to it."""
    return torch.full_like(bounds.lower, point).clamp(min=bounds.lower, max=bounds.upper)


def relative(ulps: float) -> Error:
    """Return an error of so many units in the last place of the result."""
    return lambda z, computed: 2 * ulps * UNIT * computed.abs() + TINY


def _absolute(units: float) -> Error:
    """Return the same for functions that exceed 1 in size only by a little, and cancel."""
    return lambda z, computed: 2 * units * UNIT * (1 + computed.abs())


CLOSE, CLOSE_SLOPE = relative(8), relative(16)
LEVEL_SLOPE = _absolute(32)
POWER_SLOPE = relative(1024)
"""The exponent less 1 is rounded: ``z^δ`` is off by up to ``|ln z| < 745`` units."""
