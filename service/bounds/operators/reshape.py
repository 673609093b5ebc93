"""Views, copies and everything else that keeps an instance's entries in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from service.bounds.graph import BatchSize, Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated, backward_rule
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
        return Propagated((units,))

    @backward_rule(GatheredRows)
    def backward_gathered(self, node: Node, rows: GatheredRows, tp_group: RankGroup) -> Propagated | None:
        return Propagated((rows,))

    @backward_rule(Patches)
    def backward_patches(self, node: Node, patches: Patches, tp_group: RankGroup) -> Propagated | None:
        alike = image_of(node.input_shapes[0]) == image_of(node.shape) is not None
        return Propagated((patches,)) if alike else None

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
