"""``where`` by a constant condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.flat import by_row
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated
from service.bounds.operators.allowance import Roundings, has_constant, repeats
from service.bounds.operators.base import LinearOperator
from service.bounds.operators.broadcasting import operand, unbroadcast
from service.bounds.operators.conversion import Call, Converter, Shape, Value, Values, aligned
from service.bounds.operators.elementwise import Elementwise
from service.bounds.rank_group import RankGroup


def _converted(call: Call, values: Values, shape: Shape) -> Tensor:
    condition, yes, no = values
    if condition.array is None:
        return _choose_by_variable(call, values, shape)
    rank = len(shape)
    mask = torch.tensor(condition.array.reshape((1,) * (rank - condition.array.ndim) + condition.array.shape))
    first, second = aligned([yes, no, Value(shape, None, condition.array)][:2])
    return torch.where(mask.to(first.device), first, second)


def _choose_by_variable(call: Call, values: Values, shape: Shape) -> Tensor:
    """Choose by a condition that depends on the input; ``Where`` by a constant one is linear."""
    condition, *operands = values
    for value in operands:
        if value.array is not None and value.tensor is None:
            raise call.refuse("its condition depends on the input, and it chooses integers")
    stretched = [each if each.constant else Value(shape, _stretched(each, shape)) for each in (condition, *operands)]
    asked, yes, no = (each.float for each in stretched)
    return chosen(asked - 0.5, yes, no)


def _stretched(value: Value, shape: Shape) -> Tensor:
    own = value.float.reshape(-1, *(1,) * (len(shape) - len(value.shape)), *value.shape)
    return own if value.shape == shape else own.expand(-1, *shape)


def chosen(x: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Return ``yes`` where a value is above 0, and else ``no``."""
    return torch.where(x > 0, yes, no)


class Where(Elementwise, LinearOperator):
    """``aten.where(condition, self, other)`` by a constant condition: entries of one or the other."""

    overloads = ("aten.where.self",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Where": _converted}

    def refusal(self, node: Node) -> str | None:
        return "its condition depends on the input" if node.is_variable("condition") else None

    def _factors(self, node: Node, like: Tensor) -> dict[str, Tensor]:
        condition = operand(node, "condition", like)
        return {"self": condition, "other": 1 - condition}

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        chosen = operand(node, "condition", inputs[0].lower).bool()
        variable = iter(inputs)
        yes, no = (
            next(variable)
            if node.is_variable(name)
            else Interval.point(operand(node, name, inputs[0].lower).unsqueeze(0))
            for name in ("self", "other")
        )
        return Interval(torch.where(chosen, yes.lower, no.lower), torch.where(chosen, yes.upper, no.upper))

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        propagated: list[Tensor] = []
        bias = None
        for name, factor in self._factors(node, coefficients).items():
            part = coefficients * factor
            if node.is_variable(name):
                propagated.append(unbroadcast(part, node.input_shapes[len(propagated)]))
            else:
                # A mask of attention puts −∞ at entries that nothing reads: their coefficient is 0.
                terms = part * operand(node, name, coefficients)
                bias = by_row(torch.where(part == 0, torch.zeros_like(terms), terms)).sum(dim=2)
        return Propagated(tuple(propagated), bias)

    def roundings(self, node: Node) -> Roundings:
        return Roundings(repeats(node), node.size + 2 if has_constant(node, "self", "other") else 0)
