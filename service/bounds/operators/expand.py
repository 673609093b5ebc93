"""``expand``: entries repeated along dimensions of length 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated
from service.bounds.linear.rows.block import Block, before_broadcast, lengths
from service.bounds.operators.allowance import Roundings, repeats
from service.bounds.operators.base import LinearOperator
from service.bounds.operators.broadcasting import unbroadcast
from service.bounds.operators.sharding import Cut, Whole
from service.bounds.rank_group import RankGroup


class Expand(LinearOperator):
    """``aten.expand(self, size)``: entries repeated along dimensions of length 1."""

    overloads = ("aten.expand.default",)

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return inputs[0].map(lambda end: end.expand(end.shape[0], *node.shape))

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((unbroadcast(coefficients, node.input_shapes[0]),))

    def within(self, node: Node, block: Block) -> tuple[Node, tuple[Block, ...]] | None:
        before = before_broadcast(block, node.input_shapes[0])
        return replace(node, shape=lengths(block), input_shapes=(lengths(before),)), (before,)

    def roundings(self, node: Node) -> Roundings:
        return Roundings(repeats(node))

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Whole:
        return Whole("it repeats entries, of which ranks would have to keep count")
