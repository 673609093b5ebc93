"""Operators that move entries: views, other orders, repeats, parts, values side by side, and padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from service.bounds.flat import by_row
from service.bounds.graph import BatchSize, Node, Ref, Repeated
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated, backward_rule
from service.bounds.linear.rows.block import Block, BlockRows, before_broadcast, lengths, reshaped
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.linear.rows.patches import Patches, image_of
from service.bounds.linear.rows.structured import GatheredRows
from service.bounds.operators.allowance import Roundings, repeats
from service.bounds.operators.base import AccumulatingOperator, ExactOperator, LinearOperator
from service.bounds.operators.broadcasting import dimension_of, unbroadcast
from service.bounds.operators.sharding import Cut, Share, Whole
from service.bounds.rank_group import RankGroup


class Reshape(ExactOperator):
    """Another shape for the same entries in the same order: views, copies, added or dropped dimensions of length 1."""

    overloads = (
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.reshape.default",
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.clone.default",
        "aten.alias.default",
        "aten.detach.default",
        "aten._to_copy.default",
    )

    keeps_order = True
    makes_nan = False

    def stretch(self, node: Node) -> float:
        return 1.0

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return inputs[0].map(lambda end: end.reshape(end.shape[0], *node.shape))

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((coefficients.reshape(*coefficients.shape[:2], *node.input_shapes[0]),))

    @backward_rule(IdentityRows)
    def backward_identity(self, node: Node, units: IdentityRows, tp_group: RankGroup) -> Propagated | None:
        part = None if units.block is None else self.within(node, units.block)
        return Propagated((replace(units, block=None if part is None else part[1][0]),))

    @backward_rule(GatheredRows)
    def backward_gathered(self, node: Node, rows: GatheredRows, tp_group: RankGroup) -> Propagated | None:
        return Propagated((rows,))

    @backward_rule(Patches)
    def backward_patches(self, node: Node, patches: Patches, tp_group: RankGroup) -> Propagated | None:
        alike = image_of(node.input_shapes[0]) == image_of(node.shape) is not None
        return Propagated((patches,)) if alike else None

    def within(self, node: Node, block: Block) -> tuple[Node, tuple[Block, ...]] | None:
        before = reshaped(block, node.shape, node.input_shapes[0])
        if before is None:
            return None
        return replace(node, shape=lengths(block), input_shapes=(lengths(before),)), (before,)

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | Whole:
        """Join the dimension with those after it, or split it; the dimensions before it keep their entries."""
        cut, before = cuts[node.inputs[0]], node.input_shapes[0]
        outer = prod(before[: cut.dim])
        for dim, length in enumerate(node.shape):
            if prod(node.shape[:dim]) != outer or length == 1:
                continue
            if length % cut.length == 0 and prod(before[cut.dim :]) % length == 0:
                return Cut(dim, length, cut.share * (length // cut.length))
            inner = cut.length // length
            if cut.length % length == 0 and cut.share % inner == 0:
                return Cut(dim, length, cut.share // inner)
            break
        return Whole("the division does not fall between its entries")

    def local_arguments(self, node: Node, cut: Cut, share: Share) -> dict[str, Any]:
        sized = next((name for name in ("size", "shape") if name in node.arguments), None)
        own = {} if sized is None else {sized: (BatchSize(), *cut.local(node.shape))}
        return {**node.arguments, **own}


def _dimensions_of(node: Node) -> tuple[int, ...]:
    rank = len(node.shape) + 1
    return tuple(int(dimension) % rank for dimension in node.arguments["dims"])


class Permute(ExactOperator):
    """``aten.permute(self, dims)``; dimension 0 is the batch and stays."""

    overloads = ("aten.permute.default",)
    makes_nan = False

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


class Expand(LinearOperator):
    """``aten.expand(self, size)``: entries repeated along dimensions of length 1."""

    overloads = ("aten.expand.default",)
    makes_nan = False

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


class _SomeEntries(AccumulatingOperator):
    """Some of the entries along a dimension."""

    makes_nan = False

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | Whole:
        cut = cuts[node.inputs[0]]
        return Whole("it takes some of the divided entries") if dimension_of(node) == cut.dim + 1 else cut


class Slice(ExactOperator, _SomeEntries):
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


class Select(_SomeEntries):
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


class Pad(LinearOperator):
    """``aten.constant_pad_nd(self, pad, value)``; negative padding takes entries away."""

    overloads = ("aten.constant_pad_nd.default",)

    def stretch(self, node: Node) -> float:
        return 1.0

    def refusal(self, node: Node) -> str | None:
        beyond = len(node.arguments["pad"]) // 2 > len(node.shape)
        return "it pads the batch" if beyond else None

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        pad, value = list(node.arguments["pad"]), float(node.arguments["value"])
        return inputs[0].map(lambda end: torch.nn.functional.pad(end, pad, value=value))

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        pad, value = list(node.arguments["pad"]), float(node.arguments["value"])
        through = torch.nn.functional.pad(coefficients, [-length for length in pad])
        if value == 0:
            return Propagated((through,))
        around = torch.nn.functional.pad(coefficients.new_zeros(node.input_shapes[0]), pad, value=value)
        return Propagated((through,), coefficients.flatten(2) @ around.flatten())

    def roundings(self, node: Node) -> Roundings:
        return Roundings(bias=node.size if node.arguments["value"] else 0)

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | Whole:
        cut = cuts[node.inputs[0]]
        beyond = len(node.arguments["pad"]) // 2 >= len(node.shape) - cut.dim
        return Whole("it pads the divided dimension") if beyond else cut
