"""Relaxations of any smooth function of one variable, from its derivative and its inflection points.

The slope is a choice, which only decides how tight a line is. Given a slope k, the intercept is *computed*: the
extremum of f(z) − k·z over the interval, which lies at an end or where f′(z) = k, at most once between inflection
points. So any slope, also an optimised one, gives a sound line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.operators.curve import Curve, CurveShape, Error, Function, all_within, with_ends
from service.bounds.operators.elementwise import Activation
from service.bounds.operators.table import LineTable
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Family, Lines, Relaxation

UNIFORM_POINTS, HALF = 8, 4
STEPS = 9
"""Lines of a table, an odd number."""
NEAREST = 2.0**-20
"""The share of an interval that lies between its ends and the points at which tangents are taken."""
PAIRS = 2**24
"""Entries of a table of chords: one for each pair of points."""
BISECTIONS = {torch.float64: 24, torch.float32: 12, torch.float16: 6, torch.bfloat16: 6}
"""A bracket of ``2^−n`` of a piece costs a line about ``4^−n`` of the function's range there."""


@dataclass(frozen=True)
class SmoothFunction(CurveShape):
    """``function`` with its ``derivative``, and bounds of the errors of their float64 evaluations.

    ``inverse(slope, near)`` gives about the point at which the derivative is ``slope``, between the same inflection
    points as ``near``, and anything where there is none. Without it, the derivative is bisected.
    """

    function: Function
    derivative: Function
    value_error: Error
    slope_error: Error
    inverse: Callable[[Tensor, Tensor], Tensor] | None = None
    samples: tuple[float, ...] = ()
    """Extra abscissae at which the slope changes most; they only serve to choose slopes."""

    @cached_property
    def curve(self) -> Curve:
        """Return the function as the rigorous bounds evaluate it."""
        return Curve(**{each.name: getattr(self, each.name) for each in fields(Curve)})

    def range(self, bounds: Interval) -> Interval:
        """Return the least and the greatest value: at the ends, or at a stationary point within."""
        if self.defined is not None:
            usable = self.defined(bounds)
            found = self._range(self._where(usable, bounds))
            return Interval(torch.where(usable, found.lower, -torch.inf), torch.where(usable, found.upper, torch.inf))
        return self._range(bounds)

    def _range(self, bounds: Interval) -> Interval:
        values = self.function(with_ends(self.stationary, bounds))
        return Interval(values.amin(dim=0), values.amax(dim=0))

    def _where(self, usable: Tensor, bounds: Interval) -> Interval:
        """Return ``bounds``, or a point at which everything has a value."""
        return bounds.map(lambda end: torch.where(usable, end, torch.full_like(end, self.inside)))

    def _usable(self, bounds: Interval) -> Tensor:
        finite = (bounds.lower > -torch.inf) & (bounds.upper < torch.inf)
        return finite if self.defined is None else finite & self.defined(bounds)

    def relax(self, bounds: Interval) -> Relaxation:
        lower_slope, upper_slope = self._slopes(self._where(self._usable(bounds), bounds))
        return self.with_slopes(bounds, lower_slope, upper_slope)

    def family(self, bounds: Interval, plain: Relaxation) -> Family:
        """Return the lines that an optimiser may choose from, around those of the ``plain`` relaxation.

        They are lines of a table with the plain ones in the middle. For a function that is convex or concave
        throughout they are the chord and any tangent instead, and plain ones only if an interval has no such
        lines.
        """
        if not self.inflections:
            return _Tangents.of(self, plain, bounds)
        return LineTable.of(self.lines(plain, bounds), torch.full_like(bounds.lower, 0.5))

    def lines(self, plain: Relaxation, bounds: Interval) -> Relaxation:
        """Return lines ``(batch, STEPS, *shape)`` that touch the envelopes from one end of the interval to the other.

        The middle ones are the plain ones.
        """
        inside = self._where(self._usable(bounds), bounds)
        points = self._points(inside)
        first, last = _chords(points, self.function(points), inside)
        lower = _spread(first.amin(dim=0), plain.lower_slope, last.amax(dim=0))
        upper = _spread(first.amax(dim=0), plain.upper_slope, last.amin(dim=0))
        return self.with_slopes(bounds.map(lambda end: end.unsqueeze(1)), lower, upper)

    def with_slopes(self, bounds: Interval, lower_slope: Tensor, upper_slope: Tensor) -> Relaxation:
        """Return the tightest lines of these slopes, moved outwards by their rounding error.

        Slopes may have more rows than the bounds, to which they broadcast. On an infinite interval the lines are the
        ends of the function's range.
        """
        finite = self._usable(bounds)
        inside, span = self._where(finite, bounds), self.range(bounds)
        slopes = torch.stack([lower_slope, upper_slope])
        slopes = torch.where(finite & slopes.isfinite(), slopes, torch.zeros_like(slopes))
        lower_slope, upper_slope = slopes.unbind()
        above, below = self._least(inside, slopes).unbind()
        return Relaxation(
            lower_slope=lower_slope,
            upper_slope=upper_slope,
            lower_intercept=torch.where(finite, above, span.lower),
            upper_intercept=torch.where(finite, -below, span.upper),
        )

    def _least(self, bounds: Interval, slopes: Tensor) -> Tensor:
        """Return lower bounds of ``f(z) − k z`` for the first of two slopes k and of ``k z − f(z)`` for the second."""
        eps, largest = 4 * torch.finfo(slopes.dtype).eps, torch.finfo(slopes.dtype).max
        edges = with_ends(self.inflections, bounds).unsqueeze(1)
        at_edges = self.function(edges)
        ends = at_edges[0].abs() + at_edges[-1].abs()
        sloped = slopes.detach().abs() * torch.maximum(bounds.lower.abs(), bounds.upper.abs())
        sign = torch.linspace(1, -1, 2, dtype=slopes.dtype, device=slopes.device).reshape(2, *[1] * (slopes.ndim - 1))
        rise = sign * slopes

        def heights(points: Tensor, values: Tensor) -> Tensor:
            # Next to a pole, the error of the largest value would hide all others.
            sizes = ends if self.defined is None else values.abs().clamp(max=largest)
            return (sign * values).clamp(max=largest) - rise * points - eps * (sizes + sloped).detach()

        least = heights(edges, at_edges).amin(dim=0)
        # At an extremum the height does not change with z: its gradient needs the points as constants only.
        with torch.no_grad():
            start, end, is_flatter = edges[:-1], edges[1:], self.derivative(edges) < slopes
            low, point, high = self._bracket(start, end, slopes)
            # If the height is nowhere level in a piece, it is lowest at an end, which gradients must reach.
            steep = self.derivative(point)
            level = is_flatter[:-1] != is_flatter[1:]
            # If the function bends away from the line, it is above its tangent in the bracket; if not, the ends
            # of the piece are lowest, and the tangent is above them.
            fall = ((steep - slopes).abs() + eps * steep.abs()) * torch.maximum(point - low, high - point)
        inner = torch.where(level, heights(point, self.function(point)) - fall, torch.inf)
        least = torch.minimum(least, inner.amin(dim=0))
        return least - eps * least.detach().abs()

    @staticmethod
    def slack(bounds: Interval, slope: Tensor, values: Tensor) -> Tensor:
        """Return the rounding error of a line's height, from the sizes of the values behind it."""
        reach = torch.maximum(bounds.lower.abs(), bounds.upper.abs())
        return 4 * torch.finfo(values.dtype).eps * (values + slope.abs() * reach)

    def _bracket(self, start: Tensor, end: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a bracket of f′(z) = slope between two points, with a point of it that nearly solves the equation, in
        order; if there is no solution, any.
        """
        if self.inverse is not None:
            point = self.inverse(slope, start / 2 + end / 2)
            return start, torch.fmax(torch.fmin(point, end), start), end  # NaN becomes an end
        rising = self.derivative(start) < slope
        low, high = start.expand_as(rising), end.expand_as(rising)
        for step in range(-len(self.samples), BISECTIONS[start.dtype]):
            middle = torch.add(low / 2, high, alpha=0.5)
            if step < 0:  # where the derivative changes most, so that wide intervals are narrowed at once
                middle = torch.full_like(middle, self.samples[step]).clamp(low, high)
            before = (self.derivative(middle) < slope) == rising
            low, high = torch.where(before, middle, low), torch.where(before, high, middle)
        return low, low / 2 + high / 2, high

    def _slopes(self, bounds: Interval) -> tuple[Tensor, Tensor]:
        """Return slopes of the convex and the concave envelope at the interval's middle, over sampled points.

        A line of minimal mean distance touches the envelope there.
        """
        points, middle = self._points(bounds), bounds.centre
        values = self.function(points)
        before, after = (points[:-HALF], values[:-HALF]), (points[HALF:], values[HALF:])
        lower_slope = upper_slope = self.derivative(middle)
        lowest, highest = torch.full_like(middle, torch.inf), torch.full_like(middle, -torch.inf)
        at_once = max(1, PAIRS // max(1, points.numel()))
        for part in zip(*(torch.split(each, at_once) for each in before), strict=True):
            chord, at_middle, usable = _pairs(bounds, part, after)
            below, index = torch.where(usable, at_middle, torch.inf).min(dim=0)
            lower_slope = torch.where(below < lowest, _pick(chord, index), lower_slope)
            above, index = torch.where(usable, at_middle, -torch.inf).max(dim=0)
            upper_slope = torch.where(above > highest, _pick(chord, index), upper_slope)
            lowest, highest = torch.minimum(lowest, below), torch.maximum(highest, above)
        return lower_slope, upper_slope

    def _points(self, bounds: Interval) -> Tensor:
        """Return ``(points, batch, *shape)``: evenly spread ones, and between their halves those at which the function
        bends.
        """
        lower, upper = bounds.lower, bounds.upper
        fractions = torch.linspace(0, 1, UNIFORM_POINTS, dtype=lower.dtype, device=lower.device)
        fractions = fractions.reshape(-1, *[1] * lower.ndim)
        spread = lower * (1 - fractions) + upper * fractions
        if not self.samples:
            return spread
        return torch.cat([spread[:HALF], all_within(self.samples, bounds), spread[HALF:]])


@dataclass(frozen=True, eq=False)
class _Tangents:
    """Convex or concave entry by entry: one line is the chord, the other touches at a free point of the interval.

    ``plain`` are lines for entries whose interval is not ``usable``.
    """

    smooth: SmoothFunction
    bounds: Interval
    usable: Tensor
    convex: Tensor
    chord: Tensor
    chord_at: Tensor
    plain: Relaxation
    start: tuple[Tensor, ...]

    @classmethod
    def of(cls, smooth: SmoothFunction, plain: Relaxation, bounds: Interval) -> _Tangents:
        usable = smooth._usable(bounds)
        inside = smooth._where(usable, bounds)
        low, high = smooth.function(inside.lower), smooth.function(inside.upper)
        run = inside.width
        convex = smooth.derivative(inside.upper) >= smooth.derivative(inside.lower)
        wide = run > 16 * torch.finfo(run.dtype).eps * torch.maximum(inside.lower.abs(), inside.upper.abs())
        chord = (high - low) / torch.where(wide, run, torch.ones_like(run))
        # Through that end of the chord from which rounding errs outwards: both ends are tried.
        heights = torch.stack([low - chord * inside.lower, high - chord * inside.upper])
        at = torch.where(convex, heights.amax(dim=0), heights.amin(dim=0))
        slack = smooth.slack(inside, chord, low.abs() + high.abs())
        chord_at = torch.where(convex, at + slack, at - slack)
        start = (torch.full_like(inside.lower, 0.5),)
        return cls(smooth, inside, usable & wide & chord.isfinite(), convex, chord, chord_at, plain, start)

    def member(self, parameters: tuple[Tensor, ...]) -> Lines:
        low, high = self.bounds.lower.unsqueeze(1), self.bounds.upper.unsqueeze(1)
        # Away from the ends, of which one may lie next to a pole: no tangent is steeper than there are numbers.
        place = NEAREST + (1 - 2 * NEAREST) * parameters[0]
        point = (low + place * (high - low)).clamp(low, high)
        value, slope = self.smooth.function(point), self.smooth.derivative(point)
        slack = 4 * torch.finfo(value.dtype).eps * (value.abs() + (slope * point).abs()).detach()
        convex, usable = self.convex.unsqueeze(1), self.usable.unsqueeze(1)
        chord, chord_at = self.chord.unsqueeze(1), self.chord_at.unsqueeze(1)
        touching = value - slope * point + torch.where(convex, -slack, slack)
        lines = (
            (torch.where(convex, slope, chord), self.plain.lower_slope),
            (torch.where(convex, chord, slope), self.plain.upper_slope),
            (torch.where(convex, touching, chord_at), self.plain.lower_intercept),
            (torch.where(convex, chord_at, touching), self.plain.upper_intercept),
        )
        none = value.new_zeros(())
        return Lines(
            *(torch.where(usable, ours, none if plain is None else plain.unsqueeze(1)) for ours, plain in lines)
        )


def _pairs(
    bounds: Interval, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chords between all pairs of points with values, each ``(pairs, batch, *shape)``: the slope, the height
    at the interval's middle, and whether there is a chord that goes over it.
    """
    (point, value), (points, values), middle = (each.unsqueeze(1) for each in first), second, bounds.centre
    smallest = 16 * torch.finfo(middle.dtype).eps * torch.maximum(bounds.lower.abs(), bounds.upper.abs())
    run = points - point
    far = run > smallest
    # Divided by 1 if there is no chord: 0/0 would spoil the gradient even if it is not used.
    chord = (values - value) / torch.where(far, run, torch.ones_like(run))
    at_middle = value + chord * (middle - point)
    usable = (point <= middle) & (points >= middle) & far
    return chord.flatten(0, 1), at_middle.flatten(0, 1), usable.flatten(0, 1)


def _pick(table: Tensor, index: Tensor) -> Tensor:
    return table.gather(0, index.unsqueeze(0)).squeeze(0)


def _chords(points: Tensor, values: Tensor, bounds: Interval) -> tuple[Tensor, Tensor]:
    """Return slopes from the first and from the last of ``points`` to all others, ``(points, batch, *shape)``.

    Points that are too close for a slope get the slope of the whole chord.
    """
    low, high = bounds.lower, bounds.upper
    smallest = 64 * torch.finfo(low.dtype).eps * torch.maximum(low.abs(), high.abs())
    at_low, at_high = values[0], values[-1]
    whole = (at_high - at_low) / torch.where(high - low > smallest, high - low, torch.ones_like(low))
    return tuple(
        torch.where(run > smallest, rise / torch.where(run > smallest, run, torch.ones_like(run)), whole)
        for run, rise in ((points - low, values - at_low), (high - points, at_high - values))
    )  # type: ignore[return-value]


def _spread(first: Tensor, middle: Tensor, last: Tensor) -> Tensor:
    """Return ``(batch, STEPS, *shape)`` slopes from ``first`` through ``middle`` to ``last``, in order."""
    first, last = first.expand_as(middle), last.expand_as(middle)
    half = torch.linspace(0, 1, STEPS // 2 + 1, dtype=middle.dtype, device=middle.device)
    half = half.reshape(1, -1, *[1] * (middle.ndim - 1))
    before = torch.lerp(first.unsqueeze(1), middle.unsqueeze(1), half)
    after = torch.lerp(middle.unsqueeze(1), last.unsqueeze(1), half)
    return torch.cat([before, after[:, 1:]], dim=1)


class SmoothActivation(Activation):
    """An operator of a :class:`SmoothFunction`, the same in every node unless :meth:`smooth` says otherwise."""

    function: ClassVar[SmoothFunction]

    def smooth(self, node: Node) -> SmoothFunction:
        """Return the function of a node."""
        return self.function

    def pieces(self, node: Node) -> None:
        """Return None: wherever a smooth function is split, it bends on both sides."""

    def rigorous_interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return self.smooth(node).curve.range(inputs[0])

    def rigorous_lines(self, node: Node, bounds: Interval, lower_slope: Tensor, upper_slope: Tensor) -> Relaxation:
        return self.smooth(node).curve.lines(bounds, lower_slope, upper_slope)

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return self.smooth(node).range(inputs[0])

    def unstable(self, node: Node, bounds: Interval) -> Tensor:
        return bounds.upper > bounds.lower

    def relax(self, node: Node, bounds: Interval) -> Relaxation:
        return self.smooth(node).relax(bounds)

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        return self.smooth(node).family(bounds[0], self.relax(node, bounds[0]))
