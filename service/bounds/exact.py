"""Computes the outputs of a small network of straight pieces and steps at one input, as rational numbers without any
rounding.

Floating-point numbers are rational, and so are their sums and products. If a bound is attained, only exact values can
decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor, inf
from typing import Any

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.graph import Node
from service.bounds.network import Network
from service.bounds.operators import LINEAR, NONLINEAR
from service.bounds.operators.add import Addition, Negation, Subtraction
from service.bounds.operators.broadcasting import operand
from service.bounds.operators.choice import UndecidedWhere
from service.bounds.operators.convolution import Convolution
from service.bounds.operators.linear import AddMatrixProduct, Linear
from service.bounds.operators.matmul import MatrixFromLeft, MatrixProduct, TwoDimensionalProduct
from service.bounds.operators.maximum import OPERANDS, Maximum
from service.bounds.operators.moves import Concatenate, Expand, Pad, Permute, Reshape, Select, Slice
from service.bounds.operators.mul import Multiple
from service.bounds.operators.stepped import Floor
from service.bounds.operators.sum import Sum
from service.bounds.progress import OutOfTimeError, check_time
from service.bounds.rank_group import RankGroup
from service.bounds.rigorous.method import plain_convolutions

MOST_ENTRIES, MOST_TERMS = 2**22, 2**18
"""Most entries of the matrix of a linear node, and most terms of all sums together."""
_EXACT = frozenset({
    AddMatrixProduct, Addition, Concatenate, Convolution, Expand, Linear, MatrixFromLeft, MatrixProduct, Multiple,
    Negation, Pad, Permute, Reshape, Select, Slice, Subtraction, Sum, TwoDimensionalProduct,
})  # fmt: skip
"""Linear operators that give the rows of an identity their constants as they are: each is multiplied by 1, and added
to 0."""

Values = Sequence[Fraction]
Numbers = Sequence[Any]
"""Rational numbers, or values that can be added to each other, multiplied by rationals and compared."""


@torch.no_grad()
def exact_outputs(network: Network, x: Tensor, deadline: float = inf) -> Values | None:
    """Return the outputs at ``x`` ``(features,)``; ``None`` for a network that is large, divided, or has other
    operators, and after ``deadline`` (``time.monotonic``).
    """
    try:
        return exact_values(network, [Fraction(each) for each in x.double().tolist()], x, MOST_TERMS, deadline)
    except OutOfTimeError:
        return None


def exact_values(network: Network, given: Numbers, x: Tensor, most: int, deadline: float = inf) -> Numbers | None:
    """Return the outputs for such inputs, on the device of ``x``, with a limit on the terms of all sums
    together; ``None`` beyond it, and like :func:`exact_outputs`. Raises
    :class:`~service.bounds.progress.OutOfTimeError` after ``deadline`` (``time.monotonic``).
    """
    if network.tp_group.axis.size > 1 or network.before is not None:
        return None
    values: dict[str, Numbers] = {network.graph.input.name: given}
    left = most
    for node in network.graph.nodes[1:]:
        inputs = [values[name] for name in node.inputs]
        check_time(deadline)
        if node.operator in NONLINEAR:
            found = _nonlinear(node, inputs, x)
        else:
            matrices = _matrices(node, x)
            if matrices is not None and not all(bool(each.isfinite().all()) for each in matrices):
                return None
            left -= 0 if matrices is None else sum(int(each.count_nonzero()) for each in matrices)
            found = None if matrices is None or left < 0 else _affine(matrices, inputs, deadline)
        if found is None:
            return None
        values[node.name] = found
    return values[network.graph.output.name]


def _matrices(node: Node, like: Tensor) -> list[Tensor] | None:
    """Return the node's matrices of its inputs, and of 1, ``(entries, …)``; ``None`` if they may be rounded."""
    operator = LINEAR.get(node.operator)
    widest = max(node.size, *(torch.Size(shape).numel() for shape in node.input_shapes))
    if operator is None or type(operator) not in _EXACT or not _is_plain(node) or node.size * widest > MOST_ENTRIES:
        return None
    identity = torch.eye(node.size, dtype=torch.float64, device=like.device).reshape(1, node.size, *node.shape)
    with plain_convolutions():
        propagated = operator.backward(node, identity, RankGroup())
    onto = [by_instance(each[0]) for each in propagated.coefficients if isinstance(each, Tensor)]
    bias = identity.new_zeros(node.size, 1) if propagated.bias is None else propagated.bias.reshape(-1, 1)
    return [*onto, bias.expand(node.size, 1)]


def _is_plain(node: Node) -> bool:
    """Return whether a node has no factors besides its constants."""
    return all(abs(float(node.arguments.get(name, 1))) == 1 for name in ("alpha", "beta"))


def _affine(matrices: Sequence[Tensor], inputs: Sequence[Numbers], deadline: float) -> Numbers:
    rows: list[Any] = [Fraction(0)] * len(matrices[0])
    for matrix, given in zip(matrices, (*inputs, [Fraction(1)]), strict=True):
        for row, column in matrix.nonzero().tolist():
            check_time(deadline)
            rows[row] += Fraction(float(matrix[row, column])) * given[column]
    return rows


def _nonlinear(node: Node, inputs: Sequence[Numbers], like: Tensor) -> Numbers | None:
    operator = NONLINEAR[node.operator]
    if isinstance(operator, Maximum):
        operands = _operands(node, inputs[1:], like)
        if operands is None:
            return None
        return [max(pair) for pair in zip(*operands, strict=True)]
    if isinstance(operator, Floor | UndecidedWhere):
        return _stepped(node, inputs, like)
    pieces = operator.pieces(node)
    if pieces is None:
        return None
    slope = Fraction(pieces.slope)
    return [each if each >= 0 else slope * each for each in inputs[0]]


def _stepped(node: Node, inputs: Sequence[Numbers], like: Tensor) -> Numbers | None:
    """Return a floor, or the operand that a comparison chooses; ``None`` for an input with many values."""
    if not all(isinstance(each, Fraction) for each in inputs[0]):
        return None
    if isinstance(NONLINEAR[node.operator], Floor):
        return [Fraction(floor(each)) for each in inputs[0]]
    operands = _operands(node, inputs[1:], like)
    if operands is None:
        return None
    return [yes if each > 0 else no for each, yes, no in zip(inputs[0], *operands, strict=True)]


def _operands(node: Node, inputs: Sequence[Numbers], like: Tensor) -> list[Numbers] | None:
    """Return both operands of a maximum or of a choice, broadcast; ``None`` if one is infinite."""
    remaining, found = iter(zip(inputs, node.input_shapes[1:], strict=True)), list[Numbers]()
    for name in OPERANDS:
        if node.is_variable(name):
            values, shape = next(remaining)
            places = torch.arange(len(values)).reshape(shape).expand(node.shape)
            found.append([values[place] for place in places.flatten().tolist()])
        else:
            constant = operand(node, name, like.double()).expand(node.shape)
            if not bool(constant.isfinite().all()):
                return None
            found.append([Fraction(each) for each in constant.flatten().tolist()])
    return found
