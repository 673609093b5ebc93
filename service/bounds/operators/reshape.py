"""Views, copies and everything else that keeps an instance's entries in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from service.bounds.graph import BatchSize, Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated, backward_rule
from service.bounds.linear.rows.block import Block, lengths, whole
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.linear.rows.patches import Patches, image_of
from service.bounds.linear.rows.structured import GatheredRows
from service.bounds.operators.base import ExactOperator
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
        before = _reshaped(block, node.shape, node.input_shapes[0])
        if before is None:
            return None
        return replace(node, shape=lengths(block), input_shapes=(lengths(before),)), (before,)

    def shard(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | Whole:
        """The dimension joins those after it, or is split; the dimensions before it keep their entries."""
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


def _reshaped(block: Block, shape: tuple[int, ...], into: tuple[int, ...]) -> Block | None:
    """Return the block of a value's other shape ``into`` that has the same entries in the same order; ``None`` if that
    is no block.

    Dimensions of both shapes that hold the same entries belong together: single ones, or some that must be whole but
    for the first, where they become a single one.
    """
    if 0 in shape:
        return None
    found = list[tuple[int, int]]()
    here, there = 0, 0
    while here < len(shape) or there < len(into):
        if here < len(shape) and shape[here] == 1:
            here += 1
            continue
        if there < len(into) and into[there] == 1:
            found.append((0, 1))
            there += 1
            continue
        first, second = here + 1, there + 1
        sizes = [prod(shape[here:first]), prod(into[there:second])]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                sizes[0], first = sizes[0] * shape[first], first + 1
            else:
                sizes[1], second = sizes[1] * into[second], second + 1
        joined = _joined(block[here:first], shape[here:first], into[there:second])
        if joined is None:
            return None
        found += joined
        here, there = first, second
    return tuple(found)


def _joined(block: Block, shape: tuple[int, ...], into: tuple[int, ...]) -> Block | None:
    """Return the block of dimensions ``into`` that hold the same entries as those of ``shape``."""
    if shape == into:
        return block
    if block[1:] != whole(shape[1:]):
        return None
    if len(into) == 1:
        inner = prod(shape[1:])
        return ((block[0][0] * inner, block[0][1] * inner),)
    return whole(into) if block == whole(shape) else None
