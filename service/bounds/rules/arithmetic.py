"""Entrywise arithmetic that is affine: sums, negation, multiples, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Node, Repeated
from service.bounds.interval import Interval
from service.bounds.rules.base import Coefficients, LinearRule, Pulled, UnitRows
from service.bounds.windows import Windows


def unbroadcast(coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Coefficients ``(b, rows, *out)`` on a value that was broadcast from ``shape``: ``(b, rows, *shape)``."""
    while coefficients.ndim - 2 > len(shape):
        coefficients = coefficients.sum(dim=2)
    stretched = [index + 2 for index, length in enumerate(shape) if length == 1 and coefficients.shape[index + 2] != 1]
    return coefficients.sum(dim=stretched, keepdim=True) if stretched else coefficients


def operand(node: Node, argument: str, like: Tensor) -> Tensor:
    """A constant number or tensor as a tensor of ``node.shape``."""
    value = node.arguments[argument]
    value = value.value if isinstance(value, Repeated) else value
    # A number is filled in on the device: a copy from the host would wait for all that the device has still to do.
    tensor = value if isinstance(value, Tensor) else like.new_full((), value)
    if tensor.ndim > len(node.shape):
        tensor = tensor.squeeze(0)
    return tensor.to(like.dtype).expand(node.shape)


@dataclass(frozen=True)
class Sum(LinearRule):
    """``self + sign·alpha·other``; either or both may depend on the input."""

    elementwise = True

    sign: int

    def mixes(self, node: Node) -> bool:
        return len(node.inputs) > 1

    def _factors(self, node: Node) -> dict[str, float]:
        return {"self": 1.0, "other": self.sign * float(node.arguments.get("alpha", 1))}

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        remaining = iter(inputs)
        total: Interval | None = None
        for argument, factor in self._factors(node).items():
            if node.is_variable(argument):
                term = _scaled(next(remaining), factor)
            else:
                term = Interval.point(factor * operand(node, argument, inputs[0].lower))
            total = term if total is None else Interval(total.lower + term.lower, total.upper + term.upper)
        assert total is not None
        return total

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        pulled: list[Coefficients] = []
        bias = None
        for argument, factor in self._factors(node).items():
            if node.is_variable(argument):
                scaled = coefficients if factor == 1 else coefficients * factor
                pulled.append(unbroadcast(scaled, node.input_shapes[len(pulled)]))
            else:
                constant = factor * operand(node, argument, coefficients)
                bias = coefficients.flatten(2) @ constant.flatten()
        return Pulled(tuple(pulled), bias)

    def pull_windows(self, node: Node, windows: Windows) -> Pulled | None:
        if any(shape != node.shape for shape in node.input_shapes) or len(node.inputs) != 2:
            return None
        factors = self._factors(node).values()
        scaled = [replace(windows, values=windows.values * factor) if factor != 1 else windows for factor in factors]
        return Pulled(tuple(scaled))

    def pull_units(self, node: Node, units: UnitRows, exchange: Exchange) -> Pulled | None:
        other = node.arguments["other"]
        if node.input_shapes == (node.shape, node.shape) and set(self._factors(node).values()) == {1.0}:
            return Pulled((units, units))
        whole = node.is_variable("self") and node.input_shapes[0] == node.shape
        if not whole or not isinstance(other, Tensor):
            return None
        constant = self._factors(node)["other"] * operand(node, "other", other)
        return Pulled((units,), units.select(constant.flatten()))


class Negation(LinearRule):
    """``−x``."""

    elementwise = True

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        return _scaled(inputs[0], -1.0)

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        return Pulled((-coefficients,))


@dataclass(frozen=True)
class Multiple(LinearRule):
    """``x·c``, or ``x/c`` with ``inverse``, for a constant number or tensor c."""

    elementwise = True

    inverse: bool = False

    def refusal(self, node: Node) -> str | None:
        if len(node.inputs) > 1:
            return "both of its operands depend on the input"
        if not self.inverse:
            return None
        if node.is_variable("other"):
            return "its divisor depends on the input"
        zero = bool((operand(node, "other", torch.empty(0, dtype=torch.float64)) == 0).any())
        return "its divisor contains zero" if zero else None

    def _factor(self, node: Node, like: Tensor) -> Tensor:
        argument = "other" if node.is_variable("self") else "self"
        constant = operand(node, argument, like)
        return 1 / constant if self.inverse else constant

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        factor = self._factor(node, inputs[0].lower)
        ends = inputs[0].lower * factor, inputs[0].upper * factor
        return Interval(torch.minimum(*ends), torch.maximum(*ends))

    def pull(self, node: Node, coefficients: Tensor, exchange: Exchange) -> Pulled:
        scaled = coefficients * self._factor(node, coefficients)
        return Pulled((unbroadcast(scaled, node.input_shapes[0]),))


def _scaled(interval: Interval, factor: float) -> Interval:
    if factor >= 0:
        return interval.map(lambda end: end * factor)
    return Interval(interval.upper * factor, interval.lower * factor)
