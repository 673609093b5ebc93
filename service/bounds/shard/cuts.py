"""How a value that is divided over ranks goes on through one operator, without communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

from torch import Tensor

from service.bounds.graph import PRODUCT, Node, Repeated

FINITE_AT_ZERO = {
    "aten.relu.default",
    "aten.leaky_relu.default",
    "aten.tanh.default",
    "aten.sigmoid.default",
    "aten.gelu.default",
    "aten.silu.default",
    "aten.exp.default",
    "aten.erf.default",
    "aten.sin.default",
    "aten.cos.default",
    "aten.abs.default",
    "aten.floor.default",
    "aten.neg.default",
    "aten.clone.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten._to_copy.default",
}
"""Functions of one value, entry by entry, that map the zeros of a padded width to something finite."""
OTHER_ENTRYWISE = {
    "aten.log.default",
    "aten.sqrt.default",
    "aten.rsqrt.default",
    "aten.reciprocal.default",
    "aten.pow.Tensor_Scalar",
}
WITH_OPERAND = {"aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor", "aten.where.self", PRODUCT}
"""Entrywise with broadcasting, of two values or of one and constants."""
VIEWS = {
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
}


@dataclass(frozen=True)
class Cut:
    """A value divided along ``dim`` of an instance: ``length`` entries, ``share`` of them on each rank.

    Where ``share`` times the ranks exceeds ``length`` the last ranks' shares end with padding.
    """

    dim: int
    length: int
    share: int

    def is_padded(self, ranks: int) -> bool:
        return self.share * ranks != self.length

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A rank's part of ``shape``."""
        return (*shape[: self.dim], self.share, *shape[self.dim + 1 :])

    @staticmethod
    def of(node: Node, dim: int, ranks: int) -> Cut:
        length = node.shape[dim]
        return Cut(dim, length, -(-length // ranks))


class Follow(Protocol):
    """The cut of a node's output, from those of its inputs; ``None`` where the ranks would have to communicate."""

    def __call__(self, node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | None: ...


def follow(node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | None:
    """``cuts`` has every input of ``node``."""
    rule = FOLLOW.get(node.operator)
    return None if rule is None else rule(node, cuts, ranks)


def _entrywise(node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | None:
    return cuts[node.inputs[0]]


def _finite_only(node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | None:
    cut = cuts[node.inputs[0]]
    return None if cut.is_padded(ranks) else cut


def _with_operand(node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | None:
    found = {
        replace(cuts[name], dim=cuts[name].dim + len(node.shape) - len(shape))
        for name, shape in zip(node.inputs, node.input_shapes, strict=True)
    }
    if len(found) != 1 or not _plain(node.arguments.get("condition")):
        return None
    (cut,) = found
    return cut if node.shape[cut.dim] == cut.length else None


def _plain(condition: Any) -> bool:
    return condition is None or isinstance(condition, Tensor | Repeated)


def _view(node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | None:
    """The dimension joins those after it, or is split; what comes before it keeps its entries."""
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
        return None
    return None


def _permute(node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | None:
    cut = cuts[node.inputs[0]]
    order = [int(dim) % (len(node.shape) + 1) for dim in node.arguments["dims"]]
    return replace(cut, dim=order.index(cut.dim + 1) - 1)


def _along_others(node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | None:
    cut = cuts[node.inputs[0]]
    along = int(node.arguments["dim"]) % (len(node.shape) + 1)
    return None if along == cut.dim + 1 else cut


def _pad(node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | None:
    cut = cuts[node.inputs[0]]
    from_the_end = len(node.shape) - cut.dim
    return None if len(node.arguments["pad"]) // 2 >= from_the_end else cut


def _total(node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | None:
    cut, rank = cuts[node.inputs[0]], len(node.input_shapes[0]) + 1
    over = {int(dim) % rank for dim in node.arguments["dim"] or range(rank)}
    if cut.dim + 1 in over:
        return None
    dropped = 0 if node.arguments["keepdim"] else sum(dim < cut.dim + 1 for dim in over)
    return replace(cut, dim=cut.dim - dropped)


def _channel_by_channel(node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | None:
    """A convolution of each channel by itself, as an average pool is one."""
    cut = cuts[node.inputs[0]]
    groups = int(node.arguments["groups"])
    return cut if cut.dim == 0 and groups == cut.length == node.shape[0] else None


FOLLOW: Mapping[str, Follow] = {
    **dict.fromkeys(FINITE_AT_ZERO, _entrywise),
    **dict.fromkeys(OTHER_ENTRYWISE, _finite_only),
    **dict.fromkeys(WITH_OPERAND, _with_operand),
    **dict.fromkeys(VIEWS, _view),
    "aten.permute.default": _permute,
    "aten.slice.Tensor": _along_others,
    "aten.index_select.default": _along_others,
    "aten.constant_pad_nd.default": _pad,
    "aten.sum.dim_IntList": _total,
    "aten.mean.dim": _total,
    "aten.convolution.default": _channel_by_channel,
}
