"""Operators that only move, repeat or drop entries of an instance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.rules.arithmetic import unbroadcast
from service.bounds.rules.base import LinearRule, Pulled, UnitRows


class SameOrder(LinearRule):
    """Another shape for the same entries in the same order: views, copies, added or dropped dimensions of length 1."""

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        return inputs[0].map(lambda end: end.reshape(end.shape[0], *node.shape))

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        return Pulled((coefficients.reshape(*coefficients.shape[:2], *node.input_shapes[0]),))

    def pull_units(self, node: Node, units: UnitRows, exchange: Exchange) -> Pulled | None:
        return Pulled((units,))


class Permute(LinearRule):
    """``aten.permute(self, dims)``; dimension 0 is the batch and stays."""

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        return inputs[0].map(lambda end: end.permute(*_dimensions(node)))

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        order = _dimensions(node)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        # Rows stand between the batch and the instance's own dimensions.
        return Pulled((coefficients.permute(0, 1, *(position + 1 for position in inverse[1:])),))


class Expand(LinearRule):
    """``aten.expand(self, size)``: entries repeated along dimensions of length 1."""

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        return inputs[0].map(lambda end: end.expand(end.shape[0], *node.shape))

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        return Pulled((unbroadcast(coefficients, node.input_shapes[0]),))


class Slice(LinearRule):
    """``aten.slice(self, dim, start, end, step)`` of an instance, or of the whole batch."""

    def refusal(self, node: Node) -> str | None:
        if _dimension(node) == 0 and self._range(node, 2**63 - 1) != slice(0, 2**63 - 1, 1):
            return "it takes part of the batch"
        return None

    @staticmethod
    def _range(node: Node, length: int) -> slice:
        start, end = node.arguments["start"], node.arguments["end"]
        return slice(*slice(start, end, node.arguments["step"]).indices(length))

    def _index(self, node: Node) -> tuple[slice, ...]:
        """Into one instance."""
        dimension = _dimension(node)
        if dimension == 0:
            return ()
        shape = node.input_shapes[0]
        return (*(slice(None) for _ in range(dimension - 1)), self._range(node, shape[dimension - 1]))

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        return inputs[0].map(lambda end: end[(slice(None), *self._index(node))])

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        whole = coefficients.new_zeros(*coefficients.shape[:2], *node.input_shapes[0])
        whole[(slice(None), slice(None), *self._index(node))] = coefficients
        return Pulled((whole,))


class Concatenate(LinearRule):
    """``aten.cat(tensors, dim)`` of values that all depend on the input."""

    def refusal(self, node: Node) -> str | None:
        if _dimension(node) == 0:
            return "it joins along the batch"
        constants = len(node.arguments["tensors"]) - len(node.inputs)
        return f"{constants} of its tensors are constant" if constants else None

    def mixes(self, node: Node) -> bool:
        return len(set(node.inputs)) > 1

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        lower, upper = ([end.lower for end in inputs], [end.upper for end in inputs])
        return Interval(torch.cat(lower, dim=_dimension(node)), torch.cat(upper, dim=_dimension(node)))

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        dimension = _dimension(node)
        lengths = [shape[dimension - 1] for shape in node.input_shapes]
        return Pulled(tuple(torch.split(coefficients, lengths, dim=dimension + 1)))


def _dimension(node: Node) -> int:
    """The node's ``dim``, counted from 0 with the batch."""
    dimension = int(node.arguments["dim"])
    return dimension if dimension >= 0 else dimension + len(node.shape) + 1


def _dimensions(node: Node) -> tuple[int, ...]:
    rank = len(node.shape) + 1
    return tuple(int(dimension) % rank for dimension in node.arguments["dims"])
