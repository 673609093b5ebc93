"""``slice`` and ``index_select``: some of the entries along a dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated, backward_rule
from service.bounds.linear.rows.block import Block, BlockRows, lengths
from service.bounds.operators.allowance import Roundings
from service.bounds.operators.base import AccumulatingOperator, ExactOperator
from service.bounds.operators.dimensions import dimension_of
from service.bounds.operators.sharding import Cut, Whole
from service.bounds.rank_group import RankGroup


class Slice(ExactOperator, AccumulatingOperator):
    """``aten.slice(self, dim, start, end, step)`` of an instance, or of the whole batch."""

    overloads = ("aten.slice.Tensor",)

    def stretch(self, node: Node) -> float:
        return 1.0

    def refusal(self, node: Node) -> str | None:
        if dimension_of(node) == 0 and self._range(node, 2**63 - 1) != slice(0, 2**63 - 1, 1):
            return "it takes part of the batch"
        return None

    @staticmethod
    def _range(node: Node, length: int) -> slice:
        start, end = node.arguments["start"], node.arguments["end"]
        return slice(*slice(start, end, node.arguments["step"]).indices(length))

    def _index(self, node: Node) -> tuple[slice, ...]:
        """Return the index into one instance."""
        dimension = dimension_of(node)
        if dimension == 0:
            return ()
        shape = node.input_shapes[0]
        return (*(slice(None) for _ in range(dimension - 1)), self._range(node, shape[dimension - 1]))

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return inputs[0].map(lambda end: end[(slice(None), *self._index(node))])

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        whole = coefficients.new_zeros(*coefficients.shape[:2], *node.input_shapes[0])
        whole[(slice(None), slice(None), *self._index(node))] = coefficients
        return Propagated((whole,))

    def within(self, node: Node, block: Block) -> tuple[Node, tuple[Block, ...]] | None:
        dimension, before = dimension_of(node), block
        if dimension:
            taken = self._range(node, node.input_shapes[0][dimension - 1])
            start, stop = block[dimension - 1]
            if taken.step != 1:
                return None
            before = (*block[: dimension - 1], (start + taken.start, stop + taken.start), *block[dimension:])
        # Of the part that it reads, it takes everything.
        arguments = {**node.arguments, "start": 0, "end": 2**63 - 1}
        shape = lengths(block)
        return replace(node, arguments=arguments, shape=shape, input_shapes=(shape,)), (before,)

    @backward_rule(BlockRows)
    def backward_block(self, node: Node, rows: BlockRows, tp_group: RankGroup) -> Propagated | None:
        part = self.within(node, rows.block)
        return None if part is None else Propagated((replace(rows, block=part[1][0]),))

    def backward_onto(self, node: Node, coefficients: Tensor, total: Tensor) -> None:
        total[(slice(None), slice(None), *self._index(node))] += coefficients

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | Whole:
        cut = cuts[node.inputs[0]]
        return Whole("it takes some of the divided entries") if dimension_of(node) == cut.dim + 1 else cut


class Select(AccumulatingOperator):
    """``aten.index_select(self, dim, index)`` with constant indices, which may repeat."""

    overloads = ("aten.index_select.default",)

    def refusal(self, node: Node) -> str | None:
        if node.is_variable("index"):
            return "its index depends on the input"
        return "it takes part of the batch" if dimension_of(node) == 0 else None

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return inputs[0].map(lambda end: end.index_select(dimension_of(node), node.constant("index")))

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        whole = coefficients.new_zeros(*coefficients.shape[:2], *node.input_shapes[0])
        return Propagated((whole.index_add_(dimension_of(node) + 1, node.constant("index"), coefficients),))

    def backward_onto(self, node: Node, coefficients: Tensor, total: Tensor) -> None:
        total.index_add_(dimension_of(node) + 1, node.constant("index"), coefficients)

    def roundings(self, node: Node) -> Roundings:
        return Roundings(len(node.constant("index")))

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | Whole:
        cut = cuts[node.inputs[0]]
        return Whole("it takes some of the divided entries") if dimension_of(node) == cut.dim + 1 else cut
