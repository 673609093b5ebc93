"""How a value that is divided over ranks goes on through one operator, without communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Node, Repeated
from service.bounds.interval import Interval
from service.bounds.operators import OPERATORS
from service.bounds.operators.base import Activation, Operator
from service.bounds.operators.convolution import Convolution
from service.bounds.operators.pad import Pad
from service.bounds.operators.permute import Permute
from service.bounds.operators.reshape import Reshape
from service.bounds.operators.slice import Select, Slice
from service.bounds.operators.sum import Sum


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
    operator = OPERATORS[node.operator]
    if operator.elementwise:
        return _elementwise(node, cuts, ranks)
    found = next((of for kind, of in FOLLOW.items() if isinstance(operator, kind)), None)
    return None if found is None else found(node, cuts, ranks)


def _elementwise(node: Node, cuts: Mapping[str, Cut], ranks: int) -> Cut | None:
    found = {
        replace(cuts[name], dim=cuts[name].dim + len(node.shape) - len(shape))
        for name, shape in zip(node.inputs, node.input_shapes, strict=True)
    }
    if len(found) != 1 or not _plain(node.arguments.get("condition")):
        return None
    (cut,) = found
    if node.shape[cut.dim] != cut.length or (cut.is_padded(ranks) and not _is_finite_at_zero(node)):
        return None
    return cut


def _is_finite_at_zero(node: Node) -> bool:
    """Whether padding, which is zero, has bounds and a relaxation that the zeros of the next layer can drop."""
    operator = OPERATORS[node.operator]
    if not isinstance(operator, Activation):
        return True
    if operator.refusal(node) is not None:
        return False
    entry, zero = replace(node, shape=(1,), input_shapes=((1,),)), Interval.point(torch.zeros(1, 1))
    value, lines = operator.interval(entry, [zero], Exchange()), operator.relax(entry, zero)
    ends = (value.lower, value.upper, lines.lower_slope, lines.upper_slope)
    intercepts = [each for each in (lines.lower_intercept, lines.upper_intercept) if each is not None]
    return all(bool(end.isfinite().all()) for end in (*ends, *intercepts))


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


FOLLOW: Mapping[type[Operator], Follow] = {
    Reshape: _view,
    Permute: _permute,
    Slice: _along_others,
    Select: _along_others,
    Pad: _pad,
    Sum: _total,
    Convolution: _channel_by_channel,
}
"""Of the operators that are not elementwise; a convolution that joins channels is a layer."""
