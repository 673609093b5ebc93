"""Allowances of rigorous bounds for an operator's rounding errors in float64.

Backward through a linear operator, ``Â`` is computed for ``A W``. Whatever ``Â`` is,
``A·(W v + b) ≥ Â·v + fl(A b) − |A|·E`` with ``E = γ_c |W| |v| + γ_b |b|``: the rounding of every row is one product of
``|A|`` with a vector that all rows share. The largest ``|W| |v| + |b|`` is what interval propagation gives for an
interval around 0.

Where ranks add up, each is charged for its own terms: ``|Σ A_r − fl(Σ A_r)|·|v| ≤ Σ γ_n |A_r|·|v|`` for n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.relaxation import Lines, Relaxed, RigorousStep
from service.bounds.rounding import TINY, UNIT, gamma, magnitude, widened

Propagate = Callable[[Sequence[Interval]], Interval]
"""Interval propagation through one node, from intervals of its inputs."""


@dataclass(frozen=True)
class Roundings:
    """The most roundings of a coefficient on an input, and of the bias, in one step backward.

    ``over_ranks``: a coefficient passes a sum over the ranks besides.
    """

    coefficient: int = 0
    bias: int = 0
    over_ranks: bool = False

    def on_an_input(self, ranks: int) -> int:
        return self.coefficient + (ranks if self.over_ranks else 0)


def backward_error(
    node: Node, inputs: Sequence[Interval], propagate: Propagate, coefficient: int, bias: int
) -> tuple[Tensor, Tensor]:
    """Return ``E`` ``(batch, *node.shape)`` as above for so many roundings, and ``(batch,)`` for underflow.

    If a value differs by rank, both are this rank's.
    """
    sizes = [magnitude(each) for each in inputs]
    if not coefficient and not bias:
        batch = len(sizes[0])
        return sizes[0].new_zeros(()).expand(batch, *node.shape), sizes[0].new_zeros(batch)
    whole = largest(propagate, sizes)
    constant = largest(propagate, [torch.zeros_like(size) for size in sizes])
    # A mask's −∞ with a coefficient of 0 is no term, and with any other no rounding matters.
    whole, constant = (torch.where(constant.isinf(), 0.0, each) for each in (whole, constant))
    error = gamma(coefficient) * whole + gamma(bias) * constant
    steps = coefficient + bias
    lost = sum(by_instance(size).sum(dim=1) for size in sizes) + by_instance(whole).sum(dim=1) + node.size
    return error, steps * (4 * TINY) * lost


def largest(propagate: Propagate, sizes: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of the output for inputs of at most these sizes."""
    return magnitude(propagate([Interval(-size, size) for size in sizes]))


def repeats(node: Node) -> int:
    """Return how often an entry of an input is used when it is broadcast to the output; 0 if it is not broadcast."""
    smallest = min(prod(shape) for shape in node.input_shapes)
    return 0 if smallest >= node.size else -(-node.size // max(smallest, 1))


def has_constant(node: Node, *arguments: str) -> bool:
    return any(not node.is_variable(name) for name in arguments)


def widened_by_magnitude(node: Node, computed: Interval, error: Tensor, lost: Tensor) -> Interval:
    """Widen an interval of a centre and a radius, whose ends may be off by as much as the largest values suggest."""
    error = error + lost.reshape(-1, *(1,) * len(node.shape))
    return widened(computed, error, error)


def widened_by_term(
    node: Node, inputs: Sequence[Interval], computed: Interval, propagate: Propagate, sizes: tuple[Tensor, Tensor]
) -> Interval:
    """Widen an interval whose ends are sums or multiples of ends: each by as much as the terms' ``sizes`` suggest."""
    below, above = sizes
    terms = prod(node.input_shapes[0])
    factor, lost = gamma(terms // max(node.size, 1) + 4), TINY * (terms + 2)
    return signs_kept(inputs, widened(computed, below * factor + lost, above * factor + lost), propagate)


def signs_kept(inputs: Sequence[Interval], interval: Interval, propagate: Propagate) -> Interval:
    """Undo widening beyond 0 if the inputs' signs alone rule it out; a root may follow."""
    signs = [Interval(each.lower.sign().clamp(max=0), each.upper.sign().clamp(min=0)) for each in inputs]
    image = propagate(signs)
    return Interval(
        torch.where(image.lower >= 0, interval.lower.clamp(min=0), interval.lower),
        torch.where(image.upper <= 0, interval.upper.clamp(max=0), interval.upper),
    )


def slopes_of(bounds: Interval, chosen: Relaxed, rows: int) -> tuple[Tensor, Tensor]:
    """Return the slopes of lines entry by entry, which are the results for coefficients of 1 and −1."""
    batch, _, *shape = bounds.lower.shape
    ones = bounds.lower.new_ones(batch, rows, *shape)
    return chosen.backward(ones)[0][0], -chosen.backward(-ones)[0][0]


def lines_step(bounds: Interval, lines: Lines) -> RigorousStep:
    """Return the step through lines that hold over the reals on ``bounds`` ``(batch, 1, *shape)``."""
    slope = torch.maximum(lines.lower_slope.abs(), lines.upper_slope.abs())
    # Level lines multiply nothing, so values may be infinite.
    size = torch.where((slope == 0).all(dim=1, keepdim=True), 0.0, magnitude(bounds))
    intercepts = [each.abs() for each in (lines.lower_intercept, lines.upper_intercept) if each is not None]
    constant = reduce(torch.maximum, intercepts, torch.zeros_like(slope))
    entries = size[0].numel()
    # Six if lines rise and fall: two products, a difference up to twice as large as a slope, and a sum.
    error = 8 * UNIT * slope * size + gamma(2 * entries + 8) * constant
    lost = entries * 8 * TINY * (1 + by_instance(size).sum(dim=1))
    return RigorousStep(error, lost, lines)


def planes_step(
    node: Node, inputs: Sequence[Interval], propagate: Propagate, chosen: Relaxed, longest: int
) -> RigorousStep:
    """Return the step through planes through corners of the box, in any mixture: few products of ends for each
    coefficient and intercept. ``longest`` is the number of products in the longest sum.
    """
    size = largest(propagate, [magnitude(each) for each in inputs])
    error = (16 * gamma(longest + repeats(node) + 8) + 8 * gamma(node.size + 8)) * size
    reach = sum(by_instance(magnitude(each)).sum(dim=1) for each in inputs) + by_instance(size).sum(dim=1)
    return RigorousStep(error.unsqueeze(1), (node.size + 8) * 64 * TINY * (1 + reach), chosen)
