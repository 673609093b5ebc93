"""Allowances for the rounding of linear operators, forward and backward.

Backward, ``Â`` is computed for ``A W``. Whatever ``Â`` is, ``A·(W v + b) ≥ Â·v + fl(A b) − |A|·E`` with
``E = γ_c |W| |v| + γ_b |b|``: the rounding of every row is one product of ``|A|`` with a vector that all rows share.
The largest ``|W| |v| + |b|`` is what interval propagation gives for an interval around 0, for every linear operator.

Where ranks add up, each is charged for its own terms: ``|Σ A_r − fl(Σ A_r)|·|v| ≤ Σ γ_n |A_r|·|v|`` for n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.operators import OPERATORS
from service.bounds.operators.add import Addition
from service.bounds.operators.base import Operator
from service.bounds.operators.cat import Concatenate
from service.bounds.operators.collectives import (
    CopyToGroup,
    GatherFromGroup,
    GatherWithReduce,
    ReduceFromGroup,
    ReduceScatter,
    ScatterToGroup,
)
from service.bounds.operators.convolution import Convolution
from service.bounds.operators.expand import Expand
from service.bounds.operators.linear import AddMatrixProduct, AffineOperator, Linear
from service.bounds.operators.matmul import MatrixFromLeft, MatrixProduct
from service.bounds.operators.mul import Multiple
from service.bounds.operators.neg import Negation
from service.bounds.operators.pad import Pad
from service.bounds.operators.permute import Permute
from service.bounds.operators.reshape import Reshape
from service.bounds.operators.slice import Select, Slice
from service.bounds.operators.sum import Sum
from service.bounds.operators.where import Where
from service.bounds.rigorous.rounding import TINY, gamma, magnitude, symmetric, widened

Widen = Callable[[Node, Sequence[Interval], Interval, Exchange], Interval]


@dataclass(frozen=True)
class Roundings:
    """How many roundings a coefficient on an input, and the bias, pass at most in one step backward.

    ``over_ranks``: a coefficient passes a sum over the ranks besides.
    """

    coefficient: int = 0
    bias: int = 0
    over_ranks: bool = False

    def on_an_input(self, ranks: int) -> int:
        return self.coefficient + (ranks if self.over_ranks else 0)


@dataclass(frozen=True)
class Allowance:
    """``widen`` makes a propagated interval hold in real arithmetic; by default it does."""

    backward: Callable[[Node], Roundings]
    widen: Widen = lambda node, inputs, found, exchange: found


def backward_error(node: Node, inputs: Sequence[Interval], exchange: Exchange) -> tuple[Tensor, Tensor]:
    """``E`` ``(batch, *node.shape)`` as above, and ``(batch,)`` for what underflows, whatever the coefficients.

    Of a value that differs by rank both are this rank's.
    """
    roundings = LINEAR[type(OPERATORS[node.operator])].backward(node)
    coefficient = roundings.on_an_input(exchange.axis.size)
    sizes = [magnitude(each) for each in inputs]
    if not coefficient and not roundings.bias:
        batch = len(sizes[0])
        return sizes[0].new_zeros(()).expand(batch, *node.shape), sizes[0].new_zeros(batch)
    whole = _of_magnitude(node, sizes, exchange)
    constant = _of_magnitude(node, [torch.zeros_like(size) for size in sizes], exchange)
    # A mask's −∞ with a coefficient of 0 is no term, and with any other no rounding matters.
    whole, constant = (torch.where(constant.isinf(), 0.0, each) for each in (whole, constant))
    error = gamma(coefficient) * whole + gamma(roundings.bias) * constant
    steps = coefficient + roundings.bias
    lost = sum(size.flatten(1).sum(dim=1) for size in sizes) + whole.flatten(1).sum(dim=1) + node.size
    return error, steps * (4 * TINY) * lost


def _of_magnitude(node: Node, sizes: Sequence[Tensor], exchange: Exchange) -> Tensor:
    return magnitude(OPERATORS[node.operator].interval(node, [symmetric(size) for size in sizes], exchange))


def repeats(node: Node) -> int:
    """How often an entry of an input is used where it is broadcast to the output; 0 where it is not."""
    smallest = min(prod(shape) for shape in node.input_shapes)
    return 0 if smallest >= node.size else -(-node.size // max(smallest, 1))


def _exact(node: Node) -> Roundings:
    return Roundings()


def _has_constant(node: Node, *arguments: str) -> bool:
    return any(not node.is_variable(name) for name in arguments)


def _affine(node: Node) -> Roundings:
    operator = OPERATORS[node.operator]
    assert isinstance(operator, AffineOperator)
    weight = operator.read(node).weight
    return Roundings(max(weight.shape[-2:]) + repeats(node) + 8, node.size + 8)


def _from_left(node: Node) -> Roundings:
    return Roundings(max(node.constant("self").shape[-2:]) + repeats(node) + 8)


def _convolution(node: Node) -> Roundings:
    weight = node.constant("weight")
    return Roundings(max(weight[0].numel(), weight[:, 0].numel()) + 8, node.size + 8)


def _sum(node: Node) -> Roundings:
    scaled = 0 if abs(float(node.arguments.get("alpha", 1))) == 1 else 2
    return Roundings(scaled + repeats(node), node.size + 4 if _has_constant(node, "self", "other") else 0)


def _choose(node: Node) -> Roundings:
    return Roundings(repeats(node), node.size + 2 if _has_constant(node, "self", "other") else 0)


def _by_magnitude(node: Node, inputs: Sequence[Interval], found: Interval, exchange: Exchange) -> Interval:
    """Centres and radii: both ends may be off by as much as the largest values suggest."""
    error, lost = backward_error(node, inputs, exchange)
    error = error + lost.reshape(-1, *(1,) * len(node.shape))
    return widened(found, error, error)


def _by_term(node: Node, inputs: Sequence[Interval], found: Interval, exchange: Exchange) -> Interval:
    """Each end is a sum of ends, or a multiple of one: it may be off by as much as their own values suggest."""
    operator = OPERATORS[node.operator]
    below, above = (
        magnitude(operator.interval(node, [Interval.point(end.abs())], exchange))
        for end in (inputs[0].lower, inputs[0].upper)
    )
    if isinstance(operator, Multiple):  # a negative factor exchanges the ends
        below, above = found.lower.abs(), found.upper.abs()
    factor, lost = gamma(prod(node.input_shapes[0]) // max(node.size, 1) + 4), TINY * (prod(node.input_shapes[0]) + 2)
    return signs_kept(node, inputs, widened(found, below * factor + lost, above * factor + lost), exchange)


def _by_rank(node: Node, inputs: Sequence[Interval], found: Interval, exchange: Exchange) -> Interval:
    """Each end is the sum of the ranks' own ends: it may be off by as much as their sizes suggest."""
    sizes = OPERATORS[node.operator].interval(node, [Interval(inputs[0].lower.abs(), inputs[0].upper.abs())], exchange)
    factor, lost = gamma(exchange.axis.size), TINY * exchange.axis.size
    return signs_kept(node, inputs, widened(found, sizes.lower * factor + lost, sizes.upper * factor + lost), exchange)


def signs_kept(node: Node, inputs: Sequence[Interval], interval: Interval, exchange: Exchange) -> Interval:
    """Cut what widening added beyond 0 where the inputs' signs alone rule it out; a root may follow."""
    signs = [Interval(each.lower.sign().clamp(max=0), each.upper.sign().clamp(min=0)) for each in inputs]
    image = OPERATORS[node.operator].interval(node, signs, exchange)
    return Interval(
        torch.where(image.lower >= 0, interval.lower.clamp(min=0), interval.lower),
        torch.where(image.upper <= 0, interval.upper.clamp(max=0), interval.upper),
    )


def _by_one_addition(node: Node, inputs: Sequence[Interval], found: Interval, exchange: Exchange) -> Interval:
    """An addition rounds once, and not across 0; a factor before it is one rounding more."""
    alpha = abs(float(node.arguments.get("alpha", 1)))
    if alpha == 1:
        moved = widened(found, 0.0, 0.0)
        return Interval(
            torch.where(found.lower >= 0, moved.lower.clamp(min=0), moved.lower),
            torch.where(found.upper <= 0, moved.upper.clamp(max=0), moved.upper),
        )
    error = gamma(4) * _of_magnitude(node, [magnitude(each) for each in inputs], exchange) + 4 * TINY
    return widened(found, error, error)


LINEAR: Mapping[type[Operator], Allowance] = {
    Linear: Allowance(_affine, _by_magnitude),
    AddMatrixProduct: Allowance(_affine, _by_magnitude),
    MatrixProduct: Allowance(_affine, _by_magnitude),
    MatrixFromLeft: Allowance(_from_left, _by_magnitude),
    Convolution: Allowance(_convolution, _by_magnitude),
    Addition: Allowance(_sum, _by_one_addition),
    Negation: Allowance(_exact),
    Multiple: Allowance(lambda node: Roundings(repeats(node) + 4), _by_term),
    Sum: Allowance(lambda node: Roundings(4), _by_term),
    Reshape: Allowance(_exact),
    Permute: Allowance(_exact),
    Slice: Allowance(_exact),
    Expand: Allowance(lambda node: Roundings(repeats(node))),
    Concatenate: Allowance(lambda node: Roundings(bias=node.size)),
    Select: Allowance(lambda node: Roundings(len(node.constant("index")))),
    Pad: Allowance(lambda node: Roundings(bias=node.size if node.arguments["value"] else 0)),
    Where: Allowance(_choose),
    CopyToGroup: Allowance(lambda node: Roundings(over_ranks=True)),
    ReduceFromGroup: Allowance(_exact, _by_rank),
    GatherFromGroup: Allowance(_exact),
    ScatterToGroup: Allowance(_exact),
    GatherWithReduce: Allowance(lambda node: Roundings(over_ranks=True)),
    ReduceScatter: Allowance(_exact, _by_rank),
}
"""By the type of the operator. What a collective moves, or adds to zeros, it keeps to the last bit."""
