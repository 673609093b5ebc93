"""``sum`` and ``mean`` over dimensions of an instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar

from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated
from service.bounds.linear.rows.block import Block, lengths
from service.bounds.operators.allowance import Roundings, widened_by_term
from service.bounds.operators.base import LinearOperator
from service.bounds.operators.sharding import Cut, Whole
from service.bounds.rank_group import RankGroup
from service.bounds.rounding import magnitude


class Sum(LinearOperator):
    """``aten.sum(self, dim, keepdim)``."""

    overloads = ("aten.sum.dim_IntList",)
    always_mixes = True

    mean: ClassVar[bool] = False

    def refusal(self, node: Node) -> str | None:
        return "it adds up the batch" if 0 in self._over(node) else None

    @staticmethod
    def _over(node: Node) -> tuple[int, ...]:
        rank = len(node.input_shapes[0]) + 1
        given = node.arguments["dim"]
        return tuple(int(dimension) % rank for dimension in given) if given else tuple(range(rank))

    def _scale(self, node: Node) -> float:
        shape = node.input_shapes[0]
        return 1 / prod(shape[dimension - 1] for dimension in self._over(node)) if self.mean else 1.0

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        over, scale = self._over(node), self._scale(node)
        found = inputs[0].map(lambda end: end.sum(dim=over, keepdim=bool(node.arguments["keepdim"])) * scale)
        return Interval.summed(found.lower, found.upper)

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        shape = node.input_shapes[0]
        kept = [1 if index + 1 in self._over(node) else length for index, length in enumerate(shape)]
        spread = coefficients.reshape(*coefficients.shape[:2], *kept) * self._scale(node)
        return Propagated((spread.expand(*coefficients.shape[:2], *shape),))

    def within(self, node: Node, block: Block) -> tuple[Node, tuple[Block, ...]] | None:
        shape, over, spans = node.input_shapes[0], self._over(node), iter(block)
        keeps = bool(node.arguments["keepdim"])
        before = list[tuple[int, int]]()
        for index, length in enumerate(shape):
            is_over = index + 1 in over
            own = next(spans) if keeps or not is_over else None
            before.append((0, length) if own is None or is_over else own)
        return replace(node, shape=lengths(block), input_shapes=(lengths(before),)), (tuple(before),)

    def roundings(self, node: Node) -> Roundings:
        return Roundings(4)

    def widened(self, node: Node, inputs: Sequence[Interval], computed: Interval, tp_group: RankGroup) -> Interval:
        def propagate(ends: Sequence[Interval]) -> Interval:
            return self.interval(node, ends, tp_group)

        below, above = (magnitude(propagate([Interval.point(end.abs())])) for end in (inputs[0].lower, inputs[0].upper))
        return widened_by_term(node, inputs, computed, propagate, (below, above))

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | Whole:
        cut, over = cuts[node.inputs[0]], self._over(node)
        if cut.dim + 1 in over:
            return Whole("it adds up over what is divided")
        dropped = 0 if node.arguments["keepdim"] else sum(dim < cut.dim + 1 for dim in over)
        return replace(cut, dim=cut.dim - dropped)


class Mean(Sum):
    """``aten.mean(self, dim, keepdim)``."""

    overloads = ("aten.mean.dim",)

    mean = True
