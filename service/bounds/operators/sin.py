"""``sin`` and ``cos``: bounds are found in one period around 0 and shifted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import pi
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.curve import LEVEL_SLOPE, Function
from service.bounds.operators.elementwise import Activation
from service.bounds.operators.smooth import SmoothFunction
from service.bounds.operators.table import LineTable
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Family, Relaxation
from service.bounds.rounding import UNIT


class Periodic(Activation):
    """A function of period 2π between −1 and 1 whose slope is at most 1; ``around_zero`` is right on [−2π, 2π]."""

    around_zero: ClassVar[SmoothFunction]

    def shifted(self, bounds: Interval) -> tuple[Interval, Tensor, Tensor, Tensor]:
        """Return the interval moved by whole periods to around 0, the shift, its rounding error, and the
        entries that are too wide.
        """
        wide = ~(bounds.width <= 2 * pi)
        zero = torch.zeros_like(bounds.lower)
        inner = Interval(torch.where(wide, zero, bounds.lower), torch.where(wide, zero, bounds.upper))
        shift = (inner.centre / (2 * pi)).round() * (2 * pi)
        reach = torch.maximum(inner.lower.abs(), inner.upper.abs()) + shift.abs() + 1
        error = 8 * torch.finfo(reach.dtype).eps * reach
        return inner.map(lambda end: end - shift), shift, error, wide

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        inner, _, error, wide = self.shifted(inputs[0])
        found = self.around_zero.range(inner)
        one = torch.ones_like(error)
        return Interval(
            torch.where(wide, -one, (found.lower - error).clamp(min=-1)),
            torch.where(wide, one, (found.upper + error).clamp(max=1)),
        )

    def pieces(self, node: Node) -> None:
        """Return None: it bends everywhere."""

    def unstable(self, node: Node, bounds: Interval) -> Tensor:
        return bounds.upper > bounds.lower

    def relax(self, node: Node, bounds: Interval) -> Relaxation:
        inner, *moved = self.shifted(bounds)
        return _moved_back(self.around_zero.relax(inner), *moved)

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        inner, *moved = self.shifted(bounds[0])
        lines = self.around_zero.lines(self.relax(node, bounds[0]), inner)
        lines = _moved_back(lines, *(each.unsqueeze(1) for each in moved))
        return LineTable.of(lines, torch.full_like(bounds[0].lower, 0.5))

    def rigorous_interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return self.interval(node, inputs, tp_group).without_nan()

    def rigorous_lines(self, node: Node, bounds: Interval, lower_slope: Tensor, upper_slope: Tensor) -> Relaxation:
        """Return lines around 0, moved back: the shift is a rounded multiple of 2π, and the function no steeper than
        1.
        """
        inner, shift, error, wide = self.shifted(bounds)
        near = self.around_zero.curve.lines(inner, lower_slope, upper_slope)
        assert near.lower_intercept is not None
        assert near.upper_intercept is not None
        zero = torch.zeros_like(near.lower_slope)
        slack = 2 * error * (2 + near.lower_slope.abs() + near.upper_slope.abs())
        return Relaxation(
            torch.where(wide, zero, near.lower_slope),
            torch.where(wide, zero, near.upper_slope),
            torch.where(wide, zero - 1, near.lower_intercept - near.lower_slope * shift - slack),
            torch.where(wide, zero + 1, near.upper_intercept - near.upper_slope * shift + slack),
        )


def _moved_back(lines: Relaxation, shift: Tensor, error: Tensor, wide: Tensor) -> Relaxation:
    """Move lines around 0 to the interval; −1 and 1 if it holds a whole period."""
    assert lines.lower_intercept is not None
    assert lines.upper_intercept is not None
    zero, one = torch.zeros_like(error), torch.ones_like(error)
    slack = error * (2 + lines.lower_slope.abs() + lines.upper_slope.abs())
    return Relaxation(
        lower_slope=torch.where(wide, zero, lines.lower_slope),
        upper_slope=torch.where(wide, zero, lines.upper_slope),
        lower_intercept=torch.where(wide, -one, lines.lower_intercept - lines.lower_slope * shift - slack),
        upper_intercept=torch.where(wide, one, lines.upper_intercept - lines.upper_slope * shift + slack),
    )


def _multiples(first: float) -> tuple[float, ...]:
    return tuple(first + count * pi for count in range(-3, 4) if abs(first + count * pi) < 2 * pi + 0.1)


def _error(z: Tensor, computed: Tensor) -> Tensor:
    """Turning points are multiples of π, rounded: between them and the true ones f bends by nothing that counts."""
    return 16 * UNIT * computed.abs() + 1e-40


def _wave(function: Function, derivative: Function, stationary: float, inflection: float) -> SmoothFunction:
    """Return a wave of period 2π, by one of each kind of its points: the first is a maximum."""

    def inverse(slope: Tensor, near: Tensor) -> Tensor:
        rising = stationary - pi / 2  # where the slope is 1
        middle = rising + ((near - rising) / (2 * pi)).round() * (2 * pi)
        return middle + torch.copysign(slope.acos(), near - middle)

    return SmoothFunction(
        function,
        derivative,
        _error,
        LEVEL_SLOPE,
        inverse,
        stationary=_multiples(stationary),
        inflections=_multiples(inflection),
        least=-1.0,
        greatest=1.0,
    )


class Sine(Periodic):
    """``aten.sin``."""

    overloads = ("aten.sin.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Sin": entrywise(torch.sin)}
    around_zero = _wave(torch.sin, torch.cos, pi / 2, 0.0)


class Cosine(Periodic):
    """``aten.cos``."""

    overloads = ("aten.cos.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Cos": entrywise(torch.cos)}
    around_zero = _wave(torch.cos, lambda z: -torch.sin(z), 0.0, pi / 2)
