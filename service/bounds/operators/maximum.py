"""The larger of two values.

The graph has their difference d beside them: ``max(x, y) = y + relu(d)`` is relaxed, and split, as ReLU of d. Lines
of d are lines of x and y, ``y + s·(x − y) = s·x + (1 − s)·y``: nothing is subtracted that was added before. So
large values, such as those of a mask, cost no digits, and if one operand is the larger one, the bounds are its
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.graph import COMPARABLE, MAXIMUM, Node
from service.bounds.interval import Interval
from service.bounds.operators.allowance import repeats, slopes_of
from service.bounds.operators.base import NonlinearOperator
from service.bounds.operators.broadcasting import operand, sum_of_terms, unbroadcast
from service.bounds.operators.conversion import Converter, of_two
from service.bounds.operators.elementwise import Elementwise
from service.bounds.operators.pieces import TwoPieces
from service.bounds.rank_group import RankGroup
from service.bounds.relaxation import Family, Lines, Relaxation, Relaxed, RigorousStep
from service.bounds.rounding import TINY, gamma, magnitude

RELU = TwoPieces(0.0)
OPERANDS = ("self", "other")


class Maximum(Elementwise, NonlinearOperator):
    """``max(self, other)`` entrywise, with broadcasting; ``difference`` is ``self − other`` and decides which."""

    overloads = (MAXIMUM,)
    onnx: ClassVar[Mapping[str, Converter]] = {"Max": of_two(torch.maximum)}
    deciding = frozenset({0})

    def refusal(self, node: Node) -> str | None:
        return None if node.is_variable("difference") else "its operands are not compared in the graph"

    def mixes(self, node: Node) -> bool:
        return len(node.inputs) > 2

    def pieces(self, node: Node) -> None:
        """Return None: the pieces are its operands, see :meth:`piece`."""

    def breakpoint(self, node: Node, position: int) -> float | None:
        return RELU.breakpoint if position == 0 else None

    def piece(self, node: Node, inputs: Sequence[Tensor], above: Tensor) -> Tensor:
        left, right = self._operands(node, [Interval.point(each) for each in inputs])
        return torch.where(above, left.lower, right.lower)

    def interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        left, right = self._operands(node, inputs)
        whole = Interval(torch.maximum(left.lower, right.lower), torch.maximum(left.upper, right.upper))
        difference = self._compared(node, inputs)
        first, second = difference.lower >= 0, difference.upper <= 0
        lower = torch.where(first, left.lower, torch.where(second, right.lower, whole.lower))
        upper = torch.where(first, left.upper, torch.where(second, right.upper, whole.upper))
        # The larger one may be known from linear bounds that know more: the comparison made here holds as well.
        return Interval(torch.maximum(lower, whole.lower), torch.minimum(upper, whole.upper))

    def relax_on(self, node: Node, bounds: Sequence[Interval]) -> LinesOfDifference:
        return LinesOfDifference(RELU.relax(self._compared(node, bounds)), node)

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        compared = self._compared(node, bounds)
        relaxation = RELU.relax(compared)
        return _SlopesOfMaximum(relaxation, RELU.unstable(compared), node, (relaxation.lower_slope,))

    def unstable_on(self, node: Node, bounds: Sequence[Interval]) -> tuple[Tensor, ...]:
        nothing = (torch.zeros_like(each.lower, dtype=torch.bool) for each in bounds[1:])
        return (RELU.unstable(self._compared(node, bounds)), *nothing)

    def rigorous_interval(self, node: Node, inputs: Sequence[Interval], tp_group: RankGroup) -> Interval:
        return self.interval(node, inputs, tp_group).without_nan()

    def rigorous_step(self, node: Node, inputs: Sequence[Interval], chosen: Relaxed, rows: int = 1) -> RigorousStep:
        """Return the step through lines of the difference that hold over the reals: a product and a difference
        for each operand, and sums of intercepts and constants. An operand that is taken unchanged is not
        rounded.
        """
        assert isinstance(chosen, LinesOfDifference)
        compared = self._compared(node, inputs).map(lambda end: end.unsqueeze(1))
        lines = _exact_where_stable(compared, RELU.curve.lines(compared, *slopes_of(compared, chosen.lines, rows)))
        assert lines.lower_intercept is not None
        assert lines.upper_intercept is not None
        left, right = (magnitude(each).unsqueeze(1) for each in self._operands(node, inputs, whole=True))
        slopes = torch.stack([lines.lower_slope, lines.upper_slope])
        left = torch.where((slopes != 0).any(dim=0), left, 0.0)
        right = torch.where((slopes != 1).any(dim=0), right, 0.0)
        is_mixed = ((slopes != 0) & (slopes != 1)).any(dim=0)
        constant = lines.lower_intercept.abs().maximum(lines.upper_intercept.abs())
        for name, size in zip(OPERANDS, (left, right), strict=True):
            constant = constant if node.is_variable(name) else constant + size
        error = torch.where(is_mixed, gamma(8) * (left + right), 0.0) + gamma(2 * node.size + 8) * constant
        if again := repeats(node):
            error = error + gamma(again + 2) * (left + right)
        lost = 64 * (node.size + 8) * TINY * (1 + by_instance(left + right).sum(dim=1))
        return RigorousStep(error, lost, LinesOfDifference(lines, node))

    def _compared(self, node: Node, bounds: Sequence[Interval]) -> Interval:
        """Return bounds of the difference that know which operand is the larger one if their own bounds tell."""
        left, right = self._operands(node, bounds)
        most = COMPARABLE[left.lower.dtype]
        is_known = torch.minimum(magnitude(left), magnitude(right)) < most
        lower, upper = torch.where(is_known, bounds[0].lower, -inf), torch.where(is_known, bounds[0].upper, inf)
        first, second = left.lower >= right.upper, right.lower >= left.upper
        lower = torch.where(first, lower.clamp(min=0), lower)
        upper = torch.where(second & ~first, upper.clamp(max=0), upper)
        return Interval(torch.where(first, lower, torch.minimum(lower, upper)), torch.maximum(lower, upper))

    @staticmethod
    def _operands(node: Node, inputs: Sequence[Interval], whole: bool = False) -> tuple[Interval, Interval]:
        """Return the bounds of both operands, as they broadcast, or in the ``whole`` shape of the output."""
        remaining, found = iter(inputs[1:]), list[Interval]()
        for name in OPERANDS:
            if node.is_variable(name):
                each = next(remaining)
                own = each.lower.shape[1:]
                shape = (-1, *(1,) * (len(node.shape) - len(own)), *own)
                aligned = Interval(each.lower.reshape(shape), each.upper.reshape(shape))
            else:
                aligned = Interval.point(operand(node, name, inputs[0].lower).unsqueeze(0))
            found.append(aligned.map(lambda end: end.expand(-1, *node.shape)) if whole else aligned)
        return found[0], found[1]


@dataclass(frozen=True, eq=False)
class LinesOfDifference(Relaxed):
    """Lines of ReLU of the difference, as lines of the operands."""

    lines: Relaxation | Lines
    node: Node

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        node = self.node
        onto_left, bias = self.lines.backward(coefficients)
        parts = onto_left[0], coefficients - onto_left[0]
        shapes, onto = iter(node.input_shapes[1:]), [parts[0].new_zeros(()).expand_as(parts[0])]
        for name, part in zip(OPERANDS, parts, strict=True):
            if node.is_variable(name):
                onto.append(unbroadcast(part, next(shapes)))
            else:
                constant = sum_of_terms(part, operand(node, name, part))
                bias = constant if bias is None else bias + constant
        return tuple(onto), bias


@dataclass(frozen=True, eq=False)
class _SlopesOfMaximum:
    """Lines of the difference with a free lower slope at ``open_`` entries; every entry has a parameter, so
    that it has the same meaning on all bounds.
    """

    relaxation: Relaxation
    open_: Tensor
    node: Node
    start: tuple[Tensor, ...]

    def member(self, parameters: tuple[Tensor, ...]) -> LinesOfDifference:
        fixed, above = self.relaxation.lower_slope.unsqueeze(1), self.relaxation.upper_intercept
        assert above is not None
        lower = torch.where(self.open_.unsqueeze(1), parameters[0], fixed)
        return LinesOfDifference(
            Lines(lower, self.relaxation.upper_slope.unsqueeze(1), None, above.unsqueeze(1)), self.node
        )


def _exact_where_stable(compared: Interval, lines: Relaxation) -> Lines:
    """Set intercepts that are 0 over the reals to 0: those of lower lines of ReLU with slopes from 0 to 1, and
    of the piece of a decided one.
    """
    lower, upper = lines.lower_slope, lines.upper_slope
    is_below = (lower >= 0) & (lower <= 1)
    is_piece = ((compared.lower >= 0) & (upper == 1)) | ((compared.upper <= 0) & (upper == 0))
    assert lines.lower_intercept is not None
    assert lines.upper_intercept is not None
    return Lines(
        lower,
        upper,
        torch.where(is_below, 0.0, lines.lower_intercept),
        torch.where(is_piece, 0.0, lines.upper_intercept),
    )
