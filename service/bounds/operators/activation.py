"""Functions of one variable, entry by entry."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.operators.allowance import lines_step, slopes_of
from service.bounds.operators.base import NonlinearOperator
from service.bounds.operators.elementwise import Elementwise
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Lines, Relaxation, Relaxed, RigorousStep


class Activation(Elementwise, NonlinearOperator):
    """A function of one variable input, entry by entry."""

    @abstractmethod
    def rigorous_lines(self, node: Node, bounds: Interval, lower_slope: Tensor, upper_slope: Tensor) -> Relaxation:
        """Return lines of about these slopes that hold in real arithmetic on ``bounds`` ``(batch, 1, *shape)``."""

    def rigorous_step(self, node: Node, inputs: Sequence[Interval], chosen: Relaxed, rows: int = 1) -> RigorousStep:
        bounds = inputs[0].map(lambda end: end.unsqueeze(1))
        lines = self.rigorous_lines(node, bounds, *slopes_of(bounds, chosen, rows))
        return lines_step(
            bounds, Lines(lines.lower_slope, lines.upper_slope, lines.lower_intercept, lines.upper_intercept)
        )

    def relax_on(self, node: Node, bounds: Sequence[Interval]) -> Relaxed:
        return self.relax(node, bounds[0])

    def unstable_on(self, node: Node, bounds: Sequence[Interval]) -> tuple[Tensor, ...]:
        return (self.unstable(node, bounds[0]),)

    def refusal(self, node: Node) -> str | None:
        return None if len(node.inputs) == 1 else "it has more than one input that depends on the model's input"

    @abstractmethod
    def relax(self, node: Node, bounds: Interval) -> Relaxation:
        """Return linear bounds that hold on ``bounds``; an interval of width 0 is a point.

        The families that α-CROWN optimises are made around their slopes, with intercepts of their own: a subclass
        overrides this alone.
        """

    @abstractmethod
    def unstable(self, node: Node, bounds: Interval) -> Tensor:
        """Return the entries, bool ``(batch, *shape)``, whose relaxation would get tighter with tighter bounds."""

    def is_finite_at_zero(self, node: Node) -> bool:
        if self.refusal(node) is not None:
            return False
        entry, zero = replace(node, shape=(1,), input_shapes=((1,),)), Interval.point(torch.zeros(1, 1))
        value, lines = self.interval(entry, [zero], RankGroup()), self.relax(entry, zero)
        ends = (value.lower, value.upper, lines.lower_slope, lines.upper_slope)
        intercepts = [each for each in (lines.lower_intercept, lines.upper_intercept) if each is not None]
        return all(bool(end.isfinite().all()) for end in (*ends, *intercepts))
