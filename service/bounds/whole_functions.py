"""Finds functions of one value that a model spells out, and replaces them by one operator.

Exporters write GELU as ``x·(1 + erf(x/√2))/2``, others as ``x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2``, and SiLU as
``x·σ(x)``. Without this, a product of two values is relaxed as if they were independent, and rows bound both of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose, pi, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from service.bounds.graph import PRODUCT, Node, Ref

MULTIPLE, QUOTIENT, NEGATIVE = "aten.mul.Tensor", "aten.div.Tensor", "aten.neg.default"
SUM, DIFFERENCE, POWER = "aten.add.Tensor", "aten.sub.Tensor", "aten.pow.Tensor_Scalar"
ERF, TANH, SIGMOID, SOFTPLUS = (f"aten.{name}.default" for name in ("erf", "tanh", "sigmoid", "softplus"))
GELU, SILU, MISH = "aten.gelu.default", "aten.silu.default", "aten.mish.default"

CLOSE = 1e-6
"""The greatest relative distance of a constant in float32 from the one that it stands for."""
CUBIC = 0.044715
HIGHEST, DEEPEST = 3, 12
"""The highest power that is looked for, and the most nodes that may spell it out."""
Polynomial = Mapping[int, float]


def written_whole(nodes: Sequence[Node], dtype: torch.dtype) -> list[Node]:
    """Return the nodes, with an operator for each activation that is spelled out; unused nodes stay.

    Only in float32: bounds in float64 may be rigorous, and hold for the model's constants to the last digit.
    """
    if dtype != torch.float32:
        return list(nodes)
    reader = _ExpressionReader({node.name: node for node in nodes})
    return [new for node in nodes for new in reader.replaced(node)]


class _ScaledNode(NamedTuple):
    """``scale · value of a node + offset``."""

    scale: float
    offset: float
    node: Node


class _WrittenOut(NamedTuple):
    """``factor`` times an operator of one node's value."""

    factor: float
    operator: str
    argument: str
    more: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class _ExpressionReader:
    nodes: Mapping[str, Node]

    def replaced(self, node: Node) -> Iterator[Node]:
        """Yield the nodes that stand for this one: itself, or an operator and the product with its factor."""
        scaled = self._affine(node.name)
        found = None if scaled.offset else self._whole(scaled.node)
        if found is None or scaled.node.shape != node.shape:
            yield node
            return
        factor, shape = scaled.scale * found.factor, node.shape
        arguments = {"self": Ref(found.argument), **found.more}
        if isclose(factor, 1.0, rel_tol=CLOSE):
            yield replace(node, operator=found.operator, arguments=arguments, input_shapes=(shape,))
        elif scaled.node is node:
            whole = f"{node.name}_whole"
            yield Node(whole, found.operator, arguments, shape, (shape,), node.where, node.source)
            multiple = {"self": Ref(whole), "other": factor}
            yield replace(node, operator=MULTIPLE, arguments=multiple, input_shapes=(shape,))
        else:
            yield node

    def _whole(self, product: Node) -> _WrittenOut | None:
        """Return the function that a product is: a value, maybe multiplied, times a gate of the same value."""
        if product.operator != PRODUCT or product.input_shapes != (product.shape, product.shape):
            return None
        for own, other in (product.inputs, product.inputs[::-1]):
            gate = self._affine(other)
            for factor, value in self._multiples(own):
                found = self._gated(value, gate)
                if found is not None:
                    return found._replace(factor=found.factor * factor)
        return None

    def _gated(self, x: Node, gate: _ScaledNode) -> _WrittenOut | None:
        """Return the function that ``x`` times a gate is."""
        if not gate.node.inputs:
            return None
        inner = gate.node.inputs[0]
        if gate.node.operator == TANH and not gate.offset and self._is_softplus(inner, x.name):
            return _WrittenOut(gate.scale, MISH, x.name, {})
        of_x = self._polynomial(inner, x.name)
        return None if of_x is None else _gelu(x.name, gate, of_x) or _silu(x.name, gate, of_x)

    def _is_softplus(self, name: str, of: str) -> bool:
        node = self.nodes[name]
        return node.operator == SOFTPLUS and node.inputs == (of,) and node.arguments.get("beta", 1) == 1

    def _multiples(self, name: str) -> Iterator[tuple[float, Node]]:
        """Yield each value that this one is a multiple of, itself first, and the factor."""
        factor, node = 1.0, self.nodes[name]
        yield factor, node
        while (step := _step(node)) is not None and not step[1]:
            factor, node = factor * step[0], self.nodes[node.inputs[0]]
            yield factor, node

    def _affine(self, name: str) -> _ScaledNode:
        """Return a value as an affine function of the nearest earlier value that is no affine function itself."""
        scale, offset, node = 1.0, 0.0, self.nodes[name]
        while (step := _step(node)) is not None:
            scale, offset, node = scale * step[0], offset + scale * step[1], self.nodes[node.inputs[0]]
        return _ScaledNode(scale, offset, node)

    def _polynomial(self, name: str, of: str, left: int = DEEPEST) -> Polynomial | None:
        """Return coefficients by powers of the value ``of``; ``None`` if the value is no polynomial of it."""
        if name == of:
            return {1: 1.0}
        node = self.nodes[name]
        if left == 0 or not node.inputs or any(shape != node.shape for shape in node.input_shapes):
            return None
        found = [self._polynomial(each, of, left - 1) for each in node.inputs]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        if (step := _step(node)) is not None:
            return _sum({power: step[0] * each for power, each in known[0].items()}, {0: step[1]})
        return _combined(node, known)


def _gelu(x: str, gate: _ScaledNode, of_x: Polynomial) -> _WrittenOut | None:
    if not isclose(gate.offset, gate.scale, rel_tol=CLOSE):
        return None
    if gate.node.operator == ERF and _is_close(of_x, {1: 1 / sqrt(2)}):
        return _WrittenOut(2 * gate.scale, GELU, x, {"approximate": "none"})
    if gate.node.operator == TANH and _is_close(of_x, {1: sqrt(2 / pi), 3: sqrt(2 / pi) * CUBIC}):
        return _WrittenOut(2 * gate.scale, GELU, x, {"approximate": "tanh"})
    return None


def _silu(x: str, gate: _ScaledNode, of_x: Polynomial) -> _WrittenOut | None:
    """Return ``x·σ(k·x)`` as SiLU of ``k·x``."""
    if gate.node.operator != SIGMOID or gate.offset or of_x.keys() != {1} or of_x[1] <= 0:
        return None
    is_plain = isclose(of_x[1], 1.0, rel_tol=CLOSE)
    return _WrittenOut(gate.scale / of_x[1], SILU, x if is_plain else gate.node.inputs[0], {})


def _combined(node: Node, known: Sequence[Polynomial]) -> Polynomial | None:
    if node.operator == PRODUCT:
        return _product(known[0], known[1])
    if node.operator in {SUM, DIFFERENCE} and len(known) > 1 and node.arguments.get("alpha", 1) == 1:
        sign = 1 if node.operator == SUM else -1
        return _sum(known[0], {power: sign * each for power, each in known[1].items()})
    if node.operator == POWER and node.arguments["exponent"] in {2, 3}:
        square = _product(known[0], known[0])
        return square if node.arguments["exponent"] == 2 or square is None else _product(square, known[0])
    return None


def _sum(first: Polynomial, second: Polynomial) -> Polynomial:
    total = {power: first.get(power, 0.0) + second.get(power, 0.0) for power in first.keys() | second.keys()}
    return {power: each for power, each in total.items() if each}


def _product(first: Polynomial, second: Polynomial) -> Polynomial | None:
    total: Polynomial = {}
    for power, factor in first.items():
        total = _sum(total, {power + other: factor * each for other, each in second.items()})
    return total if max(total, default=0) <= HIGHEST else None


def _is_close(found: Polynomial, expected: Polynomial) -> bool:
    is_alike = found.keys() == expected.keys()
    return is_alike and all(isclose(found[power], each, rel_tol=CLOSE) for power, each in expected.items())


def _step(node: Node) -> tuple[float, float] | None:
    """Return factor and summand by which a node is computed from its one input; ``None`` for other nodes."""
    if len(node.inputs) != 1 or node.input_shapes != (node.shape,):
        return None
    if node.operator == NEGATIVE:
        return -1.0, 0.0
    own, other = (_number(node.arguments.get(name)) for name in ("self", "other"))
    if node.operator in {SUM, DIFFERENCE}:
        sign = float(node.arguments.get("alpha", 1)) * (1 if node.operator == SUM else -1)
        if other is not None:
            return 1.0, sign * other
        return None if own is None else (sign, own)
    factor = {MULTIPLE: own if other is None else other, QUOTIENT: 1 / other if other else None}.get(node.operator)
    return None if factor is None else (factor, 0.0)


def _number(argument: Any) -> float | None:
    """Return the one number that a constant is."""
    if isinstance(argument, Tensor):
        is_one = argument.numel() == 1 and not argument.requires_grad
        return float(argument) if is_one else None
    return float(argument) if isinstance(argument, int | float) else None
