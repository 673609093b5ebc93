"""Operators that only move, repeat or drop entries of an instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Node, Ref, Repeated
from service.bounds.interval import Interval
from service.bounds.rules.arithmetic import operand, unbroadcast
from service.bounds.rules.base import LinearRule, Pulled, UnitRows
from service.bounds.windows import Windows, image_of


class SameOrder(LinearRule):
    """Another shape for the same entries in the same order: views, copies, added or dropped dimensions of length 1."""

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        return inputs[0].map(lambda end: end.reshape(end.shape[0], *node.shape))

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        return Pulled((coefficients.reshape(*coefficients.shape[:2], *node.input_shapes[0]),))

    def pull_units(self, node: Node, units: UnitRows, exchange: Exchange) -> Pulled | None:
        return Pulled((units,))

    def pull_windows(self, node: Node, windows: Windows) -> Pulled | None:
        alike = image_of(node.input_shapes[0]) == image_of(node.shape) is not None
        return Pulled((windows,)) if alike else None


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
    """``aten.cat(tensors, dim)``; some of the tensors may be constants, the same for every instance."""

    def refusal(self, node: Node) -> str | None:
        return "it joins along the batch" if _dimension(node) == 0 else None

    def mixes(self, node: Node) -> bool:
        return len(set(node.inputs)) > 1

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        batch, variable = len(inputs[0].lower), iter(inputs)
        parts = [
            next(variable) if isinstance(each, Ref) else Interval.point(_repeated(each, batch))
            for each in node.arguments["tensors"]
        ]
        along = _dimension(node)
        return Interval(
            torch.cat([each.lower for each in parts], dim=along), torch.cat([each.upper for each in parts], dim=along)
        )

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        dimension, shapes = _dimension(node), iter(node.input_shapes)
        tensors = node.arguments["tensors"]
        own = [next(shapes) if isinstance(each, Ref) else _value(each).shape[1:] for each in tensors]
        pieces = torch.split(coefficients, [shape[dimension - 1] for shape in own], dim=dimension + 1)
        pairs = list(zip(tensors, pieces, strict=True))
        biases = [
            piece.flatten(2) @ _value(each)[0].flatten().to(piece.dtype)
            for each, piece in pairs
            if not isinstance(each, Ref)
        ]
        bias = sum(biases[1:], start=biases[0]) if biases else None
        return Pulled(tuple(piece for each, piece in pairs if isinstance(each, Ref)), bias)


class Select(LinearRule):
    """``aten.index_select(self, dim, index)`` with constant indices, which may repeat."""

    def refusal(self, node: Node) -> str | None:
        if node.is_variable("index"):
            return "its index depends on the input"
        return "it takes part of the batch" if _dimension(node) == 0 else None

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        return inputs[0].map(lambda end: end.index_select(_dimension(node), node.constant("index")))

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        whole = coefficients.new_zeros(*coefficients.shape[:2], *node.input_shapes[0])
        return Pulled((whole.index_add(_dimension(node) + 1, node.constant("index"), coefficients),))


class Pad(LinearRule):
    """``aten.constant_pad_nd(self, pad, value)``; negative padding takes entries away."""

    def refusal(self, node: Node) -> str | None:
        beyond = len(node.arguments["pad"]) // 2 > len(node.shape)
        return "it pads the batch" if beyond else None

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        pad, value = list(node.arguments["pad"]), float(node.arguments["value"])
        return inputs[0].map(lambda end: torch.nn.functional.pad(end, pad, value=value))

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        pad, value = list(node.arguments["pad"]), float(node.arguments["value"])
        through = torch.nn.functional.pad(coefficients, [-length for length in pad])
        if value == 0:
            return Pulled((through,))
        around = torch.nn.functional.pad(coefficients.new_zeros(node.input_shapes[0]), pad, value=value)
        return Pulled((through,), coefficients.flatten(2) @ around.flatten())


class Choose(LinearRule):
    """``aten.where(condition, self, other)`` by a constant condition: entries of one or the other."""

    elementwise = True

    def refusal(self, node: Node) -> str | None:
        return "its condition depends on the input" if node.is_variable("condition") else None

    def _factors(self, node: Node, like: Tensor) -> dict[str, Tensor]:
        condition = operand(node, "condition", like)
        return {"self": condition, "other": 1 - condition}

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        chosen = operand(node, "condition", inputs[0].lower).bool()
        variable = iter(inputs)
        yes, no = (
            next(variable)
            if node.is_variable(name)
            else Interval.point(operand(node, name, inputs[0].lower).unsqueeze(0))
            for name in ("self", "other")
        )
        return Interval(torch.where(chosen, yes.lower, no.lower), torch.where(chosen, yes.upper, no.upper))

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        pulled: list[Tensor] = []
        bias = None
        for name, factor in self._factors(node, coefficients).items():
            part = coefficients * factor
            if node.is_variable(name):
                pulled.append(unbroadcast(part, node.input_shapes[len(pulled)]))
            else:
                # A mask of attention puts −∞ where nothing is read: entries whose coefficient is 0.
                terms = part * operand(node, name, coefficients)
                bias = torch.where(part == 0, torch.zeros_like(terms), terms).flatten(2).sum(dim=2)
        return Pulled(tuple(pulled), bias)


@dataclass(frozen=True)
class Total(LinearRule):
    """``aten.sum(self, dim, keepdim)``, or the mean."""

    mean: bool = False

    def refusal(self, node: Node) -> str | None:
        return "it adds up the batch" if 0 in self._over(node) else None

    def mixes(self, node: Node) -> bool:
        return True

    @staticmethod
    def _over(node: Node) -> tuple[int, ...]:
        rank = len(node.input_shapes[0]) + 1
        given = node.arguments["dim"]
        return tuple(int(dimension) % rank for dimension in given) if given else tuple(range(rank))

    def _scale(self, node: Node) -> float:
        shape = node.input_shapes[0]
        return 1 / prod(shape[dimension - 1] for dimension in self._over(node)) if self.mean else 1.0

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        over, scale = self._over(node), self._scale(node)
        found = inputs[0].map(lambda end: end.sum(dim=over, keepdim=bool(node.arguments["keepdim"])) * scale)
        return Interval.summed(found.lower, found.upper)

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        shape = node.input_shapes[0]
        kept = [1 if index + 1 in self._over(node) else length for index, length in enumerate(shape)]
        spread = coefficients.reshape(*coefficients.shape[:2], *kept) * self._scale(node)
        return Pulled((spread.expand(*coefficients.shape[:2], *shape),))


def _value(constant: Tensor | Repeated) -> Tensor:
    """A constant with a batch dimension of 1."""
    return constant.value if isinstance(constant, Repeated) else constant


def _repeated(constant: Tensor | Repeated, batch: int) -> Tensor:
    value = _value(constant)
    return value.expand(batch, *value.shape[1:])


def _dimension(node: Node) -> int:
    """The node's ``dim``, counted from 0 with the batch."""
    dimension = int(node.arguments["dim"])
    return dimension if dimension >= 0 else dimension + len(node.shape) + 1


def _dimensions(node: Node) -> tuple[int, ...]:
    rank = len(node.shape) + 1
    return tuple(int(dimension) % rank for dimension in node.arguments["dims"])
