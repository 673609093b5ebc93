"""``add`` and ``sub``, with broadcasting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import hypot
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from service.bounds.flat import by_row
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import InitialRows, Propagated, backward_rule
from service.bounds.linear.rows.block import Block
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.linear.rows.patches import Patches
from service.bounds.operators.allowance import Roundings, has_constant, largest, repeats
from service.bounds.operators.base import ExactOperator, LinearOperator
from service.bounds.operators.broadcasting import operand, unbroadcast
from service.bounds.operators.conversion import Converter, entrywise, of_two
from service.bounds.operators.elementwise import Elementwise
from service.bounds.rank_group import RankGroup
from service.bounds.rounding import TINY, gamma, magnitude, widened


class Addition(Elementwise, LinearOperator):
    """``self + sign·alpha·other``; either or both may depend on the input."""

    overloads = ("aten.add.Tensor",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Add": of_two(torch.add), "Sum": of_two(torch.add)}

    sign: ClassVar[int] = 1

    def mixes(self, node: Node) -> bool:
        return len(node.inputs) > 1

    def _factors(self, node: Node) -> dict[str, float]:
        return {"self": 1.0, "other": self.sign * float(node.arguments.get("alpha", 1))}

    def stretch(self, node: Node) -> float:
        if any(shape != node.shape for shape in node.input_shapes):
            return super().stretch(node)
        return hypot(*(factor for name, factor in self._factors(node).items() if node.is_variable(name)))

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        remaining = iter(inputs)
        total: Interval | None = None
        for argument, factor in self._factors(node).items():
            if node.is_variable(argument):
                term = scaled_by(next(remaining), factor)
            else:
                term = Interval.point(factor * operand(node, argument, inputs[0].lower))
            total = term if total is None else Interval(total.lower + term.lower, total.upper + term.upper)
        assert total is not None
        return total

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        propagated: list[InitialRows] = []
        bias = None
        for argument, factor in self._factors(node).items():
            if node.is_variable(argument):
                scaled = coefficients if factor == 1 else coefficients * factor
                propagated.append(unbroadcast(scaled, node.input_shapes[len(propagated)]))
            else:
                constant = factor * operand(node, argument, coefficients)
                bias = _products(by_row(coefficients), constant.flatten(), _is_finite(node, constant))
        return Propagated(tuple(propagated), bias)

    def within(self, node: Node, block: Block) -> tuple[Node, tuple[Block, ...]] | None:
        part = super().within(node, block)
        constants = [node.arguments[name] for name in self._factors(node) if not node.is_variable(name)]
        if part is not None and constants:
            known = (each for each in constants if isinstance(each, Tensor))
            _finite[part[0]] = all(_is_finite(node, each) for each in known)
        return part

    @backward_rule(Patches)
    def backward_patches(self, node: Node, patches: Patches, tp_group: RankGroup) -> Propagated | None:
        if any(shape != node.shape for shape in node.input_shapes) or len(node.inputs) != 2:
            return None
        factors = self._factors(node).values()
        scaled = [replace(patches, values=patches.values * factor) if factor != 1 else patches for factor in factors]
        return Propagated(tuple(scaled))

    @backward_rule(IdentityRows)
    def backward_identity(self, node: Node, units: IdentityRows, tp_group: RankGroup) -> Propagated | None:
        factors = self._factors(node)
        if any(shape != node.shape for shape in node.input_shapes):
            return None
        if any(factor != 1 for name, factor in factors.items() if node.is_variable(name)):
            return None
        constants = [(name, node.arguments[name]) for name in factors if not node.is_variable(name)]
        if not all(isinstance(value, Tensor) for _, value in constants):
            return None
        terms = (factors[name] * operand(node, name, value) for name, value in constants)
        bias = [units.select(each.flatten()) for each in terms]
        return Propagated((units,) * len(node.inputs), bias[0] if bias else None)

    def roundings(self, node: Node) -> Roundings:
        scaled = 0 if abs(float(node.arguments.get("alpha", 1))) == 1 else 2
        return Roundings(scaled + repeats(node), node.size + 4 if has_constant(node, "self", "other") else 0)

    def widened(self, node: Node, inputs: Sequence[Interval], computed: Interval, tp_group: RankGroup) -> Interval:
        """Widen by one rounding of the sum, and not across 0; a factor before it is one rounding more."""
        if abs(float(node.arguments.get("alpha", 1))) == 1:
            moved = widened(computed, 0.0, 0.0)
            return Interval(
                torch.where(computed.lower >= 0, moved.lower.clamp(min=0), moved.lower),
                torch.where(computed.upper <= 0, moved.upper.clamp(max=0), moved.upper),
            )
        sizes = [magnitude(each) for each in inputs]
        error = gamma(4) * largest(lambda ends: self.interval(node, ends, tp_group), sizes) + 4 * TINY
        return widened(computed, error, error)


class Subtraction(Addition):
    """``self − alpha·other``."""

    overloads = ("aten.sub.Tensor",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Sub": of_two(torch.sub)}

    sign = -1


def scaled_by(interval: Interval, factor: float) -> Interval:
    if factor >= 0:
        return interval.map(lambda end: end * factor)
    return Interval(interval.upper * factor, interval.lower * factor)


_finite: WeakKeyDictionary[Node, bool] = WeakKeyDictionary()


def _is_finite(node: Node, constant: Tensor) -> bool:
    """Return whether a node's constant is finite; a device is asked once, and not while its work is recorded."""
    if node not in _finite:
        if constant.is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        _finite[node] = bool(constant.isfinite().all())
    return _finite[node]


def _products(coefficients: Tensor, constant: Tensor, is_finite: bool) -> Tensor:
    """Return ``(b, rows)``. An entry whose coefficient is 0 may be infinite, such as one that a mask takes out
    of a softmax; any other infinite entry leaves no bound.
    """
    if is_finite:
        return coefficients @ constant
    finite = constant.isfinite()
    total = coefficients @ torch.where(finite, constant, 0.0)
    is_lost = (coefficients.ne(0) & ~finite).any(dim=2)
    return total.masked_fill(is_lost, -torch.inf)


class Negation(Elementwise, ExactOperator):
    """``−x``."""

    overloads = ("aten.neg.default",)
    onnx: ClassVar[Mapping[str, Converter]] = {"Neg": entrywise(torch.neg)}

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return scaled_by(inputs[0], -1.0)

    def backward(self, node: Node, coefficients: Tensor, tp_group: RankGroup) -> Propagated:
        return Propagated((-coefficients,))
