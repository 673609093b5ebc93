"""One node of a network made rigorous: an interval, a relaxation, and what a step backward may be off by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Graph, Node, UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.operators import OPERATORS
from service.bounds.operators.base import NonlinearOperator
from service.bounds.operators.floor import Floor
from service.bounds.operators.matmul import MatrixOfTwo
from service.bounds.operators.mul import Product
from service.bounds.operators.sin import Periodic
from service.bounds.relaxation import Lines, Relaxation, Relaxed
from service.bounds.rigorous.functions import CURVES, around_zero
from service.bounds.rigorous.linear import LINEAR, backward_error, repeats, signs_kept
from service.bounds.rigorous.rounding import TINY, UNIT, gamma, magnitude, symmetric, widened


@dataclass(frozen=True, eq=False)
class Step:
    """A step backward through a node: ``|A|·error + lost`` is what it may be off by.

    ``error`` is ``(batch, rows or 1, *shape)``, ``lost`` ``(batch,)``; ``relaxed`` is there for non-linear nodes.
    """

    error: Tensor
    lost: Tensor
    relaxed: Relaxed | None = None


def refuse_unknown(graph: Graph) -> None:
    """Raises :class:`UnsupportedModelError` naming every node for whose rounding there is no allowance."""
    unknown = [str(node) for node in graph.nodes[1:] if not _is_known(node)]
    if unknown:
        raise UnsupportedModelError(
            f"no rigorous bounds for {', '.join(unknown)}: expected operators with an allowance"
        )


def _is_known(node: Node) -> bool:
    kind = type(OPERATORS[node.operator])
    return kind in LINEAR or kind in (Product, MatrixOfTwo, Floor, Periodic) or node.operator in CURVES


def interval(node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
    """One step of interval propagation that holds in real arithmetic."""
    operator = OPERATORS[node.operator]
    if node.operator in CURVES:
        return CURVES[node.operator](node).range(inputs[0])
    found = operator.interval(node, inputs, exchange)
    if type(operator) in LINEAR:
        found = LINEAR[type(operator)].widen(node, inputs, found, exchange)
    elif isinstance(operator, Product):
        found = signs_kept(node, inputs, widened(found, 4 * TINY, 4 * TINY), exchange)
    elif isinstance(operator, MatrixOfTwo):
        error = gamma(node.input_shapes[0][-1] + 12) * _product_magnitude(node, inputs) + node.size * 4 * TINY
        found = widened(found, error, error)
    return found.without_nan()


def linear_step(node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Step:
    error, lost = backward_error(node, inputs, exchange)
    return Step(error.unsqueeze(1), lost)


def nonlinear_step(node: Node, inputs: Sequence[Interval], chosen: Relaxed, rows: int = 1) -> Step:
    """Through ``chosen``, a relaxation on ``inputs`` as the operator gives it, moved outwards as far as needed.

    ``rows`` is 1 for the same relaxation in every row.
    """
    operator = OPERATORS[node.operator]
    if isinstance(operator, Product | MatrixOfTwo):
        return _planes_step(node, inputs, chosen)
    bounds = inputs[0].map(lambda end: end.unsqueeze(1))
    if isinstance(operator, Floor):
        lines = operator.relax(node, bounds)
    elif isinstance(operator, Periodic):
        lines = _periodic_lines(operator, bounds, *_slopes(bounds, chosen, rows))
    else:
        lines = CURVES[node.operator](node).lines(bounds, *_slopes(bounds, chosen, rows))
    return _lines_step(bounds, _as_lines(lines))


def _slopes(bounds: Interval, chosen: Relaxed, rows: int) -> tuple[Tensor, Tensor]:
    """Of lines entry by entry: what coefficients of 1 and of −1 become."""
    batch, _, *shape = bounds.lower.shape
    ones = bounds.lower.new_ones(batch, rows, *shape)
    return chosen.pull(ones)[0][0], -chosen.pull(-ones)[0][0]


def _as_lines(lines: Relaxation) -> Lines:
    return Lines(lines.lower_slope, lines.upper_slope, lines.lower_intercept, lines.upper_intercept)


def _periodic_lines(operator: Periodic, bounds: Interval, lower_slope: Tensor, upper_slope: Tensor) -> Relaxation:
    """Around 0, then moved back: the shift is a rounded multiple of 2π, and the function no steeper than 1."""
    inner, shift, error, wide = operator.shifted(bounds)
    near = around_zero(operator).lines(inner, lower_slope, upper_slope)
    assert near.lower_intercept is not None
    assert near.upper_intercept is not None
    zero = torch.zeros_like(near.lower_slope)
    slack = 2 * error * (2 + near.lower_slope.abs() + near.upper_slope.abs())
    return Relaxation(
        torch.where(wide, zero, near.lower_slope),
        torch.where(wide, zero, near.upper_slope),
        torch.where(wide, zero - 1, near.lower_intercept - near.lower_slope * shift - slack),
        torch.where(wide, zero + 1, near.upper_intercept - near.upper_slope * shift + slack),
    )


def _lines_step(bounds: Interval, lines: Lines) -> Step:
    slope = torch.maximum(lines.lower_slope.abs(), lines.upper_slope.abs())
    # Where lines are level nothing is multiplied, and values may be infinite.
    size = torch.where((slope == 0).all(dim=1, keepdim=True), 0.0, magnitude(bounds))
    intercepts = [each.abs() for each in (lines.lower_intercept, lines.upper_intercept) if each is not None]
    constant = reduce(torch.maximum, intercepts, torch.zeros_like(slope))
    entries = size[0].numel()
    # Six where lines rise and fall: two products, a difference up to twice as large as a slope, and a sum.
    error = 8 * UNIT * slope * size + gamma(2 * entries + 8) * constant
    lost = entries * 8 * TINY * (1 + size.flatten(1).sum(dim=1))
    return Step(error, lost, lines)


def _planes_step(node: Node, inputs: Sequence[Interval], chosen: Relaxed) -> Step:
    """Planes through corners of the box, in any mixture: few products of ends for each coefficient and intercept."""
    size = _product_magnitude(node, inputs)
    matrix = isinstance(OPERATORS[node.operator], MatrixOfTwo)
    longest = sum(node.shape[-2:]) + node.input_shapes[0][-1] if matrix else 1
    error = (16 * gamma(longest + repeats(node) + 8) + 8 * gamma(node.size + 8)) * size
    reach = sum(magnitude(each).flatten(1).sum(dim=1) for each in inputs) + size.flatten(1).sum(dim=1)
    return Step(error.unsqueeze(1), (node.size + 8) * 64 * TINY * (1 + reach), chosen)


def _product_magnitude(node: Node, inputs: Sequence[Interval]) -> Tensor:
    operator = OPERATORS[node.operator]
    assert isinstance(operator, NonlinearOperator)
    return magnitude(operator.interval(node, [symmetric(magnitude(each)) for each in inputs], Exchange()))
