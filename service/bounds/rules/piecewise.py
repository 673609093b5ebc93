"""Functions of straight pieces: ReLU, leaky ReLU, absolute value, floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.relaxation import Family, Lines, Relaxation, Single, weighted
from service.bounds.rules.base import NonlinearRule
from service.bounds.windows import Windows


class LeakyRelu(NonlinearRule):
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

    def improvable(self, node: Node, bounds: Interval) -> Tensor:
        return (bounds.lower < 0) & (bounds.upper > 0)

    def relax(self, node: Node, bounds: Interval) -> Relaxation:
        slope = self.negative_slope(node)
        lower, upper = bounds.lower, bounds.upper
        open_ = self.improvable(node, bounds)
        fixed = _either(lower >= 0, 1.0, slope, lower)
        chord = _chord_slope(lower, upper, slope)
        intercept = torch.where(lower.isfinite(), (slope - chord) * lower, (1 - chord) * upper)
        return Relaxation(
            lower_slope=torch.where(open_, _either(upper > -lower, 1.0, slope, lower), fixed),
            upper_slope=torch.where(open_, chord, fixed),
            upper_intercept=torch.where(open_, intercept, torch.zeros_like(lower)),
        )

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        """Any lower slope between those of the pieces is sound (α-CROWN, Xu et al., 2021)."""
        relaxation, open_ = self.relax(node, bounds[0]), self.improvable(node, bounds[0]).flatten(1)
        index, slope = open_.any(dim=0).nonzero().squeeze(1), self.negative_slope(node)
        if slope == 1 or not len(index):
            return Single(relaxation)
        assert relaxation.upper_intercept is not None
        fixed, chord = relaxation.lower_slope.flatten(1), relaxation.upper_slope.flatten(1)
        intercept = relaxation.upper_intercept.flatten(1)
        open_, closed, chord, intercept = (each.index_select(1, index) for each in (open_, fixed, chord, intercept))
        start = (((closed - slope) / (1 - slope)).clamp(0, 1),)
        return _Bent(slope, index, fixed, open_, closed, chord, intercept, start, relaxation, bounds[0])


@dataclass(frozen=True, eq=False)
class _Bent:
    """Two pieces that meet at 0, with a free lower slope at the entries ``index`` that are open in any instance.

    ``fixed`` ``(batch, n)`` are the slopes elsewhere; ``open_``, ``closed`` (the slope where an instance is not open),
    ``chord`` and ``intercept`` are ``(batch, len(index))``.
    """

    slope: float
    index: Tensor
    fixed: Tensor
    open_: Tensor
    closed: Tensor
    chord: Tensor
    intercept: Tensor
    start: tuple[Tensor, ...]
    whole: Relaxation
    bounds: Interval

    def shown(self, windows: Windows) -> Family:
        """Of every place in the windows: with so few entries there is nothing to pick."""
        assert self.whole.upper_intercept is not None
        open_ = (self.bounds.lower < 0) & (self.bounds.upper > 0)
        images = (open_.to(self.fixed.dtype), self.whole.lower_slope, self.whole.upper_slope)
        open_in, closed, chord = (windows.of(each) for each in images)
        start = (((closed - self.slope) / (1 - self.slope)).clamp(0, 1),)
        return _BentShown(self.slope, open_in > 0, closed, chord, windows.of(self.whole.upper_intercept), start)

    def member(self, parameters: tuple[Tensor, ...]) -> _BentMember:
        free = parameters[0] * (1 - self.slope) + self.slope if self.slope else parameters[0]
        return _BentMember(self, torch.where(self.open_.unsqueeze(1), free, self.closed.unsqueeze(1)))


@dataclass(frozen=True, eq=False)
class _BentMember:
    family: _Bent
    lower_slope: Tensor

    def pull(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        family, flat = self.family, coefficients.flatten(2)
        picked = flat.index_select(2, family.index)
        below = picked.clamp(max=0)
        bent = torch.addcmul((picked - below) * self.lower_slope, below, family.chord.unsqueeze(1))
        through = (flat * family.fixed.unsqueeze(1)).index_copy(2, family.index, bent)
        shape = (*through.shape[:2], *coefficients.shape[2:])
        return (through.reshape(shape),), weighted(below, family.intercept)


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


class Absolute(LeakyRelu):
    """``|z|``: the same two pieces with slope −1 below 0."""

    def refusal(self, node: Node) -> str | None:
        return None

    def negative_slope(self, node: Node) -> float:
        return -1.0

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        lower, upper = inputs[0].lower, inputs[0].upper
        least = torch.maximum(lower, -upper).clamp(min=0)
        return Interval(least, torch.maximum(lower.abs(), upper.abs()))


class Floor(NonlinearRule):
    """The greatest whole number not above z: constant lines where at most one step is within, else ``z − 1 … z``.

    A last bit of an end decides about a whole step, so ends are moved outwards by what rounding may have cost them.
    """

    @staticmethod
    def _steps(bounds: Interval) -> tuple[Tensor, Tensor]:
        slack = 64 * torch.finfo(bounds.lower.dtype).eps
        low, high = bounds.lower - slack * bounds.lower.abs(), bounds.upper + slack * bounds.upper.abs()
        return low.floor(), high.floor()

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        return Interval(*self._steps(inputs[0]))

    def improvable(self, node: Node, bounds: Interval) -> Tensor:
        low, high = self._steps(bounds)
        return low < high

    def relax(self, node: Node, bounds: Interval) -> Relaxation:
        low, high = self._steps(bounds)
        flat = high - low <= 1
        slope = _either(flat, 0.0, 1.0, low)
        return Relaxation(
            lower_slope=slope,
            upper_slope=slope,
            lower_intercept=torch.where(flat, low, -torch.ones_like(low)),
            upper_intercept=torch.where(flat, high, torch.zeros_like(high)),
        )


def _chord_slope(lower: Tensor, upper: Tensor, slope: float) -> Tensor:
    """Slope of the line through the ends of an interval around 0.

    An infinite end leaves one slope that can bound the function: that of the piece which goes there.
    """
    width = upper / 2 - lower / 2  # halved: the difference of large ends may overflow
    # A point has no chord; a division by its width would leave no gradient even where the result is not taken.
    chord = (upper / 2 - slope * (lower / 2)) / torch.where(width > 0, width, torch.ones_like(width))
    without_end = _either(upper.isfinite(), slope, 1.0, lower)
    return torch.where(lower.isfinite() & upper.isfinite(), chord, without_end)


def _either(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """``torch.where`` on two numbers, which alone would round them to the default dtype.

    They are filled in on the device: a copy from the host would wait for all that the device has still to do.
    """
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))
