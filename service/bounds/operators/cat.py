"""``cat``: values side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from service.bounds.flat import by_row
from service.bounds.graph import Node, Ref, Repeated
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated
from service.bounds.linear.rows.block import Block, lengths
from service.bounds.operators.allowance import Roundings
from service.bounds.operators.base import LinearOperator
from service.bounds.operators.dimensions import dimension_of
from service.bounds.operators.sharding import Cut, Whole
from service.bounds.rank_group import RankGroup


class Concatenate(LinearOperator):
    """``aten.cat(tensors, dim)``; some of the tensors may be constants, the same for every instance."""

    overloads = ("aten.cat.default",)

    def refusal(self, node: Node) -> str | None:
        return "it joins along the batch" if dimension_of(node) == 0 else None

    def mixes(self, node: Node) -> bool:
        return len(set(node.inputs)) > 1

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        batch, variable = len(inputs[0].lower), iter(inputs)
        parts = [
            next(variable) if isinstance(each, Ref) else Interval.point(_repeated(each, batch))
            for each in node.arguments["tensors"]
        ]
        along = dimension_of(node)
        return Interval(
            torch.cat([each.lower for each in parts], dim=along), torch.cat([each.upper for each in parts], dim=along)
        )

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        dimension, shapes = dimension_of(node), iter(node.input_shapes)
        tensors = node.arguments["tensors"]
        own = [next(shapes) if isinstance(each, Ref) else _value(each).shape[1:] for each in tensors]
        pieces = torch.split(coefficients, [shape[dimension - 1] for shape in own], dim=dimension + 1)
        pairs = list(zip(tensors, pieces, strict=True))
        biases = [
            by_row(piece) @ _value(each)[0].flatten().to(piece.dtype)
            for each, piece in pairs
            if not isinstance(each, Ref)
        ]
        bias = sum(biases[1:], start=biases[0]) if biases else None
        return Propagated(tuple(piece for each, piece in pairs if isinstance(each, Ref)), bias)

    def within(self, node: Node, block: Block) -> tuple[Node, tuple[Block, ...]] | None:
        along, tensors = dimension_of(node) - 1, node.arguments["tensors"]
        if block[along] != (0, node.shape[along]) or not all(isinstance(each, Ref) for each in tensors):
            return None
        before = tuple((*block[:along], (0, shape[along]), *block[along + 1 :]) for shape in node.input_shapes)
        shapes = tuple(lengths(each) for each in before)
        return replace(node, shape=lengths(block), input_shapes=shapes), before

    def roundings(self, node: Node) -> Roundings:
        return Roundings(bias=node.size)

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Whole:
        return Whole("its operands would have to be divided alike, constants too")


def _value(constant: Tensor | Repeated) -> Tensor:
    """Return a constant with a batch dimension of 1."""
    return constant.value if isinstance(constant, Repeated) else constant


def _repeated(constant: Tensor | Repeated, batch: int) -> Tensor:
    value = _value(constant)
    return value.expand(batch, *value.shape[1:])
