"""Operators whose output entries depend on the input entries at their own place, after broadcasting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from service.bounds.graph import Node, Ref, Repeated
from service.bounds.linear.rows.block import Block, before_broadcast, in_block, lengths
from service.bounds.operators.base import Operator
from service.bounds.operators.sharding import Cut, Share, Whole, shared_operand


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
        """Return whether padding, which is zero, has bounds and a relaxation that the zeros of the next layer can
        drop.
        """
        return True


def _in_block(value: Any, block: Block) -> Any:
    """Return an argument's entries in a block of the value to which it is broadcast."""
    if isinstance(value, Repeated):
        return Repeated(in_block(value.value, block))
    return in_block(value, block) if isinstance(value, Tensor) else value
