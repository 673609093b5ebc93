"""Tests whether a value is a number: half of 1 where the answer is yes, and less half of 1 where it is no."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.graph import IS_NAN, TESTS, Node
from service.bounds.interval import Interval
from service.bounds.operators.activation import Activation
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Relaxation


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
