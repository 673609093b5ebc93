"""Operators that choose: masks by a constant condition, and choices by a condition that depends on the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.graph import CHOICE, Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import Propagated
from service.bounds.operators.allowance import Roundings, has_constant, repeats
from service.bounds.operators.base import LinearOperator, NonlinearOperator
from service.bounds.operators.broadcasting import operand, sum_of_terms, unbroadcast
from service.bounds.operators.conversion import Call, Converter, Shape, Value, Values, aligned
from service.bounds.operators.elementwise import Elementwise
from service.bounds.operators.stepped import Stepped, passed_on
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Relaxed, RigorousStep
from service.bounds.rounding import TINY, gamma, magnitude


def _converted(call: Call, values: Values, shape: Shape) -> Tensor:
    condition, yes, no = values
    if condition.array is None:
        return _choose_by_variable(call, values, shape)
    mask = torch.tensor(condition.array)
    first, second, _ = aligned([yes, no, Value(condition.shape, mask, condition.array)])
    return torch.where(mask.to(first.device), first, second)


def _choose_by_variable(call: Call, values: Values, shape: Shape) -> Tensor:
    """Choose by a condition that depends on the input; ``Where`` by a constant one is linear."""
    condition, *operands = values
    for value in operands:
        if value.array is not None and value.tensor is None:
            raise call.refuse("its condition depends on the input, and it chooses integers")
    stretched = [each if each.constant else Value(shape, _stretched(each, shape)) for each in (condition, *operands)]
    asked, yes, no = (each.float for each in stretched)
    return choose(asked - 0.5, yes, no)


def _stretched(value: Value, shape: Shape) -> Tensor:
    own = value.float.reshape(-1, *(1,) * (len(shape) - len(value.shape)), *value.shape)
    return own if value.shape == shape else own.expand(-1, *shape)


def choose(x: Tensor, yes: Tensor, no: Tensor) -> Tensor:
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
        condition = operand(node, "condition", inputs[0].lower).bool()
        variable = iter(inputs)
        yes, no = (
            next(variable)
            if node.is_variable(name)
            else Interval.point(operand(node, name, inputs[0].lower).unsqueeze(0))
            for name in ("self", "other")
        )
        return Interval(torch.where(condition, yes.lower, no.lower), torch.where(condition, yes.upper, no.upper))

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        propagated: list[Tensor] = []
        bias = None
        for name, factor in self._factors(node, coefficients).items():
            part = coefficients * factor
            if node.is_variable(name):
                propagated.append(unbroadcast(part, node.input_shapes[len(propagated)]))
            else:
                # A mask of attention puts −∞ at entries that nothing reads: their coefficient is 0.
                bias = sum_of_terms(part, operand(node, name, coefficients))
        return Propagated(tuple(propagated), bias)

    def roundings(self, node: Node) -> Roundings:
        return Roundings(repeats(node), node.size + 2 if has_constant(node, "self", "other") else 0)


OPERANDS = ("self", "other")
STEEPEST = 2.0**20
"""The largest jump in the gradient of a ramp: operands may be infinite."""


class UndecidedWhere(Stepped, Elementwise, NonlinearOperator):
    """``self`` where ``condition > 0`` and ``other`` elsewhere, all of one shape.

    If the condition's sign is known, the result is that operand, to the last bit; otherwise anything from the
    least to the greatest of both. A last bit decides, so bounds of the condition are moved outwards by their
    rounding error, like those of a floor.
    """

    overloads = (CHOICE,)
    deciding = frozenset({0})
    decided_by = "condition"

    def side(self, value: Tensor) -> Tensor:
        return value > 0

    def ramp(self, arguments: Mapping[str, Tensor]) -> Tensor:
        condition, yes, no = (arguments[name] for name in (self.decided_by, *OPERANDS))
        jump = (yes - no).detach().nan_to_num(nan=0.0).clamp(-STEEPEST, STEEPEST)
        return torch.where(condition > 0, yes, no) + jump * passed_on(condition)

    def refusal(self, node: Node) -> str | None:
        if not node.is_variable("condition"):
            return "its condition is a constant"
        return None if all(shape == node.shape for shape in node.input_shapes) else "its operands are broadcast"

    def pieces(self, node: Node) -> None:
        """Return None: the function jumps."""

    @staticmethod
    def _certain_operands(condition: Interval) -> tuple[Tensor, Tensor]:
        """Return the entries at which the first, and those at which the second operand is certainly taken."""
        size = magnitude(condition)
        slack = 64 * torch.finfo(size.dtype).eps * (size + 1).nan_to_num(posinf=0.0)
        return condition.lower > slack, condition.upper < -slack

    @staticmethod
    def _operands(node: Node, inputs: Sequence[Interval]) -> list[Interval]:
        remaining = iter(inputs[1:])
        return [
            next(remaining)
            if node.is_variable(name)
            else Interval.point(operand(node, name, inputs[0].lower).unsqueeze(0)).map(
                lambda end: end.expand_as(inputs[0].lower)
            )
            for name in OPERANDS
        ]

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        (first, second), (left, right) = self._certain_operands(inputs[0]), self._operands(node, inputs)
        whole = _around(left, right)
        lower = torch.where(first, left.lower, torch.where(second, right.lower, whole.lower))
        return Interval(lower, torch.where(first, left.upper, torch.where(second, right.upper, whole.upper)))

    def relax_on(self, node: Node, bounds: Sequence[Interval]) -> ChosenOperands:
        return ChosenOperands(node, *self._certain_operands(bounds[0]), _around(*self._operands(node, bounds)))

    def unstable_on(self, node: Node, bounds: Sequence[Interval]) -> tuple[Tensor, ...]:
        first, second = self._certain_operands(bounds[0])
        return tuple(~first & ~second for _ in bounds)

    def rigorous_interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return self.interval(node, inputs, tp_group).without_nan()

    def rigorous_step(self, node: Node, inputs: Sequence[Interval], chosen: Relaxed, rows: int = 1) -> RigorousStep:
        """Return the step; it rounds only sums of constants."""
        assert isinstance(chosen, ChosenOperands)
        constant = torch.where(chosen.first | chosen.second, 0.0, magnitude(chosen.whole))
        for name, part in zip(OPERANDS, (chosen.first, chosen.second), strict=True):
            if not node.is_variable(name):
                constant = constant + torch.where(part, operand(node, name, constant).abs(), 0.0)
        error = gamma(2 * node.size + 8) * constant
        lost = 64 * (node.size + 8) * TINY * (1 + by_instance(constant).sum(dim=1))
        return RigorousStep(error.unsqueeze(1), lost, chosen)


@dataclass(frozen=True, eq=False)
class ChosenOperands(Relaxed):
    """The ``first`` operand, the ``second``, or constants ``whole`` if it may be either; all ``(batch, *shape)``."""

    node: Node
    first: Tensor
    second: Tensor
    whole: Interval

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        node, like = self.node, coefficients
        first, second = (each.unsqueeze(1).to(like.dtype) for each in (self.first, self.second))
        open_ = 1 - first - second
        above, below = coefficients.clamp(min=0) * open_, coefficients.clamp(max=0) * open_
        bias = sum_of_terms(above, self.whole.lower.unsqueeze(1)) + sum_of_terms(below, self.whole.upper.unsqueeze(1))
        onto = [torch.zeros_like(open_ * coefficients)]
        for name, taken in zip(OPERANDS, (first, second), strict=True):
            part = coefficients * taken
            if node.is_variable(name):
                onto.append(part)
            else:
                bias = bias + sum_of_terms(part, operand(node, name, like))
        return tuple(onto), bias


def _around(left: Interval, right: Interval) -> Interval:
    return Interval(torch.minimum(left.lower, right.lower), torch.maximum(left.upper, right.upper))
