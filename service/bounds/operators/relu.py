"""ReLU and leaky ReLU: two straight pieces that meet at 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from service.bounds import fused
from service.bounds.exchange import Exchange
from service.bounds.fused import FreeSlopes, Picked
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.operators.curve import Curve, CurveActivation, exact, relative
from service.bounds.relaxation import Family, Lines, Relaxation, Single
from service.bounds.windows import Windows


class LeakyRelu(CurveActivation):
    """``max(z, 0) + a·min(z, 0)`` with 0 ≤ a ≤ 1; ReLU is a = 0.

    For l < 0 < u the upper line is the chord; the lower line goes through the origin with slope 1 where u > −l,
    else a (the adaptive choice of CROWN, Zhang et al., 2018). Elsewhere both lines are the function.
    """

    def refusal(self, node: Node) -> str | None:
        slope = self.negative_slope(node)
        return None if 0 <= slope <= 1 else f"its negative_slope {slope} is not between 0 and 1"

    def negative_slope(self, node: Node) -> float:
        return float(node.arguments["negative_slope"])

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        slope = self.negative_slope(node)
        return inputs[0].map(lambda end: end.clamp(min=0) + slope * end.clamp(max=0) if slope else end.clamp(min=0))

    def curve(self, node: Node) -> Curve:
        below = self.negative_slope(node)
        error = exact if below in (-1.0, 0.0, 1.0) else relative(1)

        def function(z: Tensor) -> Tensor:
            return torch.where(z >= 0, z, below * z)

        return Curve(function, error, turning=(0.0,), stationary=(0.0,), least=0.0 if below <= 0 else -inf)

    def improvable(self, node: Node, bounds: Interval) -> Tensor:
        return (bounds.lower < 0) & (bounds.upper > 0)

    def relax(self, node: Node, bounds: Interval) -> Relaxation:
        slope = self.negative_slope(node)
        lower, upper = bounds.lower, bounds.upper
        open_ = self.improvable(node, bounds)
        fixed = either(lower >= 0, 1.0, slope, lower)
        chord = _chord_slope(lower, upper, slope)
        intercept = torch.where(lower > -torch.inf, (slope - chord) * lower, (1 - chord) * upper)
        return Relaxation(
            lower_slope=torch.where(open_, either(upper > -lower, 1.0, slope, lower), fixed),
            upper_slope=torch.where(open_, chord, fixed),
            upper_intercept=torch.where(open_, intercept, torch.zeros_like(lower)),
        )

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        """Any lower slope between those of the pieces is sound (α-CROWN, Xu et al., 2021)."""
        relaxation, open_ = self.relax(node, bounds[0]), self.improvable(node, bounds[0])
        slope = self.negative_slope(node)
        if slope == 1 or not bool(open_.any()):
            return Single(relaxation)
        assert relaxation.upper_intercept is not None
        lines = relaxation.lower_slope, relaxation.upper_slope, relaxation.upper_intercept
        free = FreeSlopes.at(open_, slope, *lines)
        start = (_places(relaxation.lower_slope.flatten(1).gather(1, free.index), slope),)
        return _Bent(free, start, relaxation, open_)


@dataclass(frozen=True, eq=False)
class _Bent:
    """Two pieces that meet at 0, with a free lower slope where an instance is open: ``start`` is ``(batch, places)``.

    ``whole`` are the lines that CROWN takes, ``open_`` is ``(batch, *shape)``.
    """

    free: FreeSlopes
    start: tuple[Tensor, ...]
    whole: Relaxation
    open_: Tensor

    def shown(self, windows: Windows) -> Family:
        """Of every place in the windows: with so few entries there is nothing to pick."""
        assert self.whole.upper_intercept is not None
        images = (self.open_.to(self.whole.lower_slope.dtype), self.whole.lower_slope, self.whole.upper_slope)
        open_in, closed, chord = (windows.of(each) for each in images)
        start, slope = (_places(closed, self.free.flattest),), self.free.flattest
        return _BentShown(slope, open_in > 0, closed, chord, windows.of(self.whole.upper_intercept), start)

    def member(self, parameters: tuple[Tensor, ...]) -> _BentMember:
        return _BentMember(self.free, parameters[0])


@dataclass(frozen=True, eq=False)
class _BentMember:
    free: FreeSlopes
    parameters: Tensor

    def pull(self, coefficients: Tensor | Picked) -> tuple[tuple[Tensor, ...], Tensor | None]:
        through, bias = fused.pull_free(coefficients, self.free, self.parameters)
        return (through,), bias

    def pull_picked(self, rows: Picked) -> tuple[tuple[Tensor, ...], Tensor | None]:
        return self.pull(rows)


@dataclass(frozen=True, eq=False)
class _BentShown:
    """The same of what windows show: all tensors are ``(batch, rows, *shape of a window)``."""

    slope: float
    open_: Tensor
    closed: Tensor
    chord: Tensor
    intercept: Tensor
    start: tuple[Tensor, ...]

    def member(self, parameters: tuple[Tensor, ...]) -> Lines:
        free = parameters[0] * (1 - self.slope) + self.slope if self.slope else parameters[0]
        return Lines(torch.where(self.open_, free, self.closed), self.chord, upper_intercept=self.intercept)


class Relu(LeakyRelu):
    """``max(z, 0)``."""

    def negative_slope(self, node: Node) -> float:
        return 0.0


def _places(slopes: Tensor, flattest: float) -> Tensor:
    """Parameters of slopes from ``flattest`` to 1."""
    return ((slopes - flattest) / (1 - flattest)).clamp(0, 1)


def _chord_slope(lower: Tensor, upper: Tensor, slope: float) -> Tensor:
    """Slope of the line through the ends of an interval around 0.

    An infinite end leaves one slope that can bound the function: that of the piece which goes there.
    """
    width = upper / 2 - lower / 2  # halved: the difference of large ends may overflow
    # A point has no chord; a division by its width would leave no gradient even where the result is not taken.
    chord = (upper / 2 - slope * (lower / 2)) / torch.where(width > 0, width, torch.ones_like(width))
    without_end = either(upper < torch.inf, slope, 1.0, lower)
    return torch.where(width < torch.inf, chord, without_end)


def either(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """``torch.where`` on two numbers, which alone would round them to the default dtype.

    They are filled in on the device: a copy from the host would wait for all that the device has still to do.
    """
    if (yes, no) == (1.0, 0.0):
        return condition.to(like.dtype)
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))
