"""Functions that jump: whole numbers, and tests whether a value is a number; for attacks, jumps as ramps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.graph import FLOOR_OF_SIGNED, IS_NAN, TESTS, Node
from service.bounds.interval import Interval
from service.bounds.operators.conversion import Converter, entrywise
from service.bounds.operators.elementwise import Activation
from service.bounds.operators.pieces import either
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Relaxation


class Stepped(ABC):
    """An operator that jumps where a value, its argument ``decided_by``, goes from one side of a step to the other."""

    decided_by: ClassVar[str]

    @abstractmethod
    def side(self, value: Tensor) -> Tensor:
        """Return a number for each entry of that value that changes from one side of a step to the other."""

    @abstractmethod
    def ramp(self, arguments: Mapping[str, Tensor]) -> Tensor:
        """Return the function with a gradient as if its steps were ramps, by its arguments' names."""


def passed_on(value: Tensor) -> Tensor:
    """Return 0 with the gradient of ``value``, where that is finite."""
    return torch.where(value.isfinite(), value - value.detach(), torch.zeros_like(value))


class NumberTest(Activation):
    """Either answer, as far as an interval of real numbers tells: :mod:`service.bounds.finite` knows more."""

    overloads = tuple(TESTS)

    YES: ClassVar[float] = 0.5

    @staticmethod
    def asks_for_nan(node: Node) -> bool:
        return node.operator == IS_NAN

    def is_surely_not(self, node: Node, bounds: Interval) -> Tensor:
        """Return the entries, bool, at which the answer is no for all numbers, maybe infinite, within the bounds."""
        if self.asks_for_nan(node):
            return bounds.lower <= bounds.upper
        return bounds.lower.isfinite() & bounds.upper.isfinite()

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        yes = torch.full_like(inputs[0].lower, self.YES)
        return Interval(-yes, yes)

    def rigorous_interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return self.interval(node, inputs, tp_group)

    def pieces(self, node: Node) -> None:
        """Return None: no split of an interval of real numbers decides it."""

    def unstable(self, node: Node, bounds: Interval) -> Tensor:
        return torch.zeros_like(bounds.lower, dtype=torch.bool)

    def relax(self, node: Node, bounds: Interval) -> Relaxation:
        level = torch.zeros_like(bounds.lower)
        return Relaxation(
            lower_slope=level, upper_slope=level, lower_intercept=level - self.YES, upper_intercept=level + self.YES
        )

    def rigorous_lines(self, node: Node, bounds: Interval, lower_slope: Tensor, upper_slope: Tensor) -> Relaxation:
        return self.relax(node, bounds)


class Floor(Stepped, Activation):
    """The greatest whole number not above z: constant lines if at most one step is within, else ``z − 1 … z``.

    The last bit of an end decides about a whole step, so ends are moved outwards by their rounding error. An end near
    0 may be the rest of cancelled terms as large as the other end, or of an ordinary size, unless the graph excludes
    it.
    """

    overloads = ("aten.floor.default", FLOOR_OF_SIGNED)
    onnx: ClassVar[Mapping[str, Converter]] = {"Floor": entrywise(torch.floor)}
    decided_by = "self"

    def side(self, value: Tensor) -> Tensor:
        return value.floor()

    def ramp(self, arguments: Mapping[str, Tensor]) -> Tensor:
        x = arguments["self"]
        return x.detach().floor() + passed_on(x)

    @staticmethod
    def _steps(node: Node, bounds: Interval) -> tuple[Tensor, Tensor]:
        size, is_signed = torch.maximum(bounds.lower.abs(), bounds.upper.abs()), node.operator == FLOOR_OF_SIGNED
        slack = 64 * torch.finfo(size.dtype).eps * (size if is_signed else size + 1).nan_to_num(posinf=0.0)
        below = torch.where(bounds.lower == 0, 0.0, slack) if is_signed else slack
        return (bounds.lower - below).floor(), (bounds.upper + slack).floor()

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return Interval(*self._steps(node, inputs[0]))

    def pieces(self, node: Node) -> None:
        """Return None: there is a step at every whole number."""

    def unstable(self, node: Node, bounds: Interval) -> Tensor:
        low, high = self._steps(node, bounds)
        return low < high

    def relax(self, node: Node, bounds: Interval) -> Relaxation:
        low, high = self._steps(node, bounds)
        flat = high - low <= 1
        slope = either(flat, 0.0, 1.0, low)
        return Relaxation(
            lower_slope=slope,
            upper_slope=slope,
            lower_intercept=torch.where(flat, low, -torch.ones_like(low)),
            upper_intercept=torch.where(flat, high, torch.zeros_like(high)),
        )

    def rigorous_interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return self.interval(node, inputs, tp_group).without_nan()

    def rigorous_lines(self, node: Node, bounds: Interval, lower_slope: Tensor, upper_slope: Tensor) -> Relaxation:
        return self.relax(node, bounds)
