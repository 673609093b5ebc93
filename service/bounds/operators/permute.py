"""``permute``: dimensions in another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated
from service.bounds.linear.rows.block import Block, lengths
from service.bounds.operators.base import ExactOperator
from service.bounds.operators.sharding import Cut
from service.bounds.rank_group import RankGroup


def _dimensions_of(node: Node) -> tuple[int, ...]:
    rank = len(node.shape) + 1
    return tuple(int(dimension) % rank for dimension in node.arguments["dims"])


class Permute(ExactOperator):
    """``aten.permute(self, dims)``; dimension 0 is the batch and stays."""

    overloads = ("aten.permute.default",)

    def stretch(self, node: Node) -> float:
        return 1.0

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return inputs[0].map(lambda end: end.permute(*_dimensions_of(node)))

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        order = _dimensions_of(node)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        # Rows stand between the batch and the instance's own dimensions.
        return Propagated((coefficients.permute(0, 1, *(position + 1 for position in inverse[1:])),))

    def within(self, node: Node, block: Block) -> tuple[Node, tuple[Block, ...]] | None:
        spans = {position - 1: span for position, span in zip(_dimensions_of(node)[1:], block, strict=True)}
        before = tuple(spans[dimension] for dimension in range(len(block)))
        return replace(node, shape=lengths(block), input_shapes=(lengths(before),)), (before,)

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut:
        cut = cuts[node.inputs[0]]
        return replace(cut, dim=_dimensions_of(node).index(cut.dim + 1) - 1)
