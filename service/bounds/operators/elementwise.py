"""Operators whose output entries depend on the input entries at their own place, and functions of one variable."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from service.bounds.graph import Node, Ref, Repeated
from service.bounds.interval import Interval
from service.bounds.linear.rows.block import Block, before_broadcast, in_block, lengths
from service.bounds.operators.allowance import lines_step, slopes_of
from service.bounds.operators.base import NonlinearOperator, Operator
from service.bounds.operators.sharding import Cut, Share, Whole, shared_operand
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Lines, Relaxation, Relaxed, RigorousStep


class Elementwise(Operator):
    """Each rank computes its own entries of a value that is divided over ranks.

    ``padding`` fills up constants if the width does not divide.
    """

    padding: ClassVar[float] = 0.0

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | Whole:
        found = {
            replace(cuts[name], dim=cuts[name].dim + len(node.shape) - len(shape))
            for name, shape in zip(node.inputs, node.input_shapes, strict=True)
        }
        condition = node.arguments.get("condition")
        if len(found) != 1 or not (condition is None or isinstance(condition, Tensor | Repeated | Ref)):
            return Whole("its operands are not divided alike")
        (cut,) = found
        if node.shape[cut.dim] != cut.length:
            return Whole("its operand is repeated along the division")
        if cut.is_padded(ranks) and not self.is_finite_at_zero(node):
            return Whole("padding, which is zero, has no bounds or no relaxation")
        return cut

    def local_arguments(self, node: Node, cut: Cut, share: Share) -> dict[str, Any]:
        return {name: shared_operand(value, node, cut, share, self.padding) for name, value in node.arguments.items()}

    def within(self, node: Node, block: Block) -> tuple[Node, tuple[Block, ...]] | None:
        blocks = tuple(before_broadcast(block, shape) for shape in node.input_shapes)
        arguments = {name: _in_block(value, block) for name, value in node.arguments.items()}
        shapes = tuple(lengths(each) for each in blocks)
        return replace(node, arguments=arguments, shape=lengths(block), input_shapes=shapes), blocks

    def is_finite_at_zero(self, node: Node) -> bool:
        """Return whether padding, which is zero, has bounds and a relaxation that zeros of the next layer can drop."""
        return True


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


def _in_block(value: Any, block: Block) -> Any:
    """Return an argument's entries in a block of the value to which it is broadcast."""
    if isinstance(value, Repeated):
        return Repeated(in_block(value.value, block))
    return in_block(value, block) if isinstance(value, Tensor) else value
