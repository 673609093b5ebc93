"""Bounds networks forward, as affine forms of a few inputs: for networks with few inputs and large layers.

A value is a linear function of the inputs with any width, plus or minus its own remainder (affine arithmetic;
the parallel lines are those of Fast-Lin, Weng et al., 2018, and DeepZ, Singh et al., 2018). All inputs' slopes go
through a layer as instances of one batch, so the work is that of a few forward passes, where a backward pass has a row
for every neuron. Rows of a backward pass then settle entries that the forms leave open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.forward import ForwardTraversal
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.methods.base import parts_of_rows, passing_at_once
from service.bounds.network import Network
from service.bounds.operators import LINEAR, OPERATORS
from service.bounds.operators.broadcasting import operand
from service.bounds.operators.maximum import LinesOfDifference
from service.bounds.options import BoundOptions
from service.bounds.relaxation import Relaxation, Relaxed

MOST_ROWS = 1024
"""Open entries of a piecewise linear layer that are bounded backward; more would cost more than cutting boxes."""


@dataclass(frozen=True, eq=False)
class AffineForm:
    """``centre + Σ slopes[i]·t_i ± rest`` with ``|t_i| ≤ 1``: ``(batch, *shape)``, slopes ``(batch, n, *shape)``."""

    centre: Tensor
    slopes: Tensor
    rest: Tensor

    def bounds(self) -> Interval:
        return Interval.around(self.centre, self.slopes.abs().sum(dim=1) + self.rest)


def affine_forward(network: Network, box: Interval, options: BoundOptions) -> Pass:
    """Return a pass with the intervals of every node and the relaxations of all non-linear ones.

    The network is not divided over ranks.
    """
    first = network.graph.input.name
    intervals, relaxations = {first: box}, dict[str, Relaxed]()
    backward = Pass(network, intervals, relaxations)
    last = {name: node for node in network.graph.nodes[1:] for name in node.inputs}
    _AffineTraversal(network, intervals, backward, relaxations, options, {first: _of_input(box)}, last).run()
    return backward


@dataclass(eq=False)
class _AffineTraversal(ForwardTraversal):
    """Propagate an affine form beside the interval of every value; ``last`` is the last node that reads a value."""

    backward: Pass
    relaxations: dict[str, Relaxed]
    options: BoundOptions
    forms: dict[str, AffineForm]
    last: Mapping[str, Node]

    def relax(self, node: Node) -> None:
        for name in node.inputs:
            self.intervals[name] = self.intervals[name].meet(self.forms[name].bounds())
        operator = self.network.operator_of(node)
        if operator.breakpoint(node, 0) is not None:
            self.intervals[node.inputs[0]] = _tightened_by_rows(self.backward, node, self.options)
        bounds, inputs = self.bounds_of_inputs(node), [self.forms[name] for name in node.inputs]
        relaxed = self.relaxations[node.name] = operator.relax_on(node, bounds)
        self.forms[node.name] = _relaxed(self.network, node, relaxed, inputs, bounds)

    def propagate(self, node: Node) -> Interval:
        if node.operator in LINEAR:
            self.forms[node.name] = _linear(self.network, node, [self.forms[name] for name in node.inputs])
        for name in set(node.inputs):
            if self.last[name] is node:  # slopes of all inputs take much more memory than intervals
                del self.forms[name]
        return super().propagate(node)


def _of_input(box: Interval) -> AffineForm:
    """Return the form of the input; only entries that have any width in some instance get a slope."""
    radius = by_instance(box.radius)
    (free,) = (radius > 0).any(dim=0).nonzero(as_tuple=True)
    slopes = radius.new_zeros(len(radius), len(free), radius.shape[1])
    slopes[:, torch.arange(len(free), device=free.device), free] = radius[:, free]
    return AffineForm(
        box.centre, slopes.reshape(len(radius), len(free), *box.lower.shape[1:]), torch.zeros_like(box.lower)
    )


def _linear(network: Network, node: Node, inputs: Sequence[AffineForm]) -> AffineForm:
    """Apply the operator to the centres, to each slope and to the remainders; its constant counts once.

    The result for a slope contains the constant; subtracting it loses digits, which go to the remainder.
    """
    operator, tp_group = OPERATORS[node.operator], network.tp_group

    def at(points: list[Tensor]) -> Tensor:
        return operator.interval(node, [Interval.point(point) for point in points], tp_group).centre

    batch, count = inputs[0].slopes.shape[:2]
    constant = at([torch.zeros_like(form.centre[:1]) for form in inputs])
    stacked = [torch.cat([form.centre, form.slopes.flatten(0, 1)]) for form in inputs]
    values = at(stacked)
    with_constant = values[batch:].reshape(batch, count, *node.shape)
    slopes = with_constant - constant.unsqueeze(1)
    lost = 2 * torch.finfo(slopes.dtype).eps * (with_constant.abs() + constant.abs().unsqueeze(1)).sum(dim=1)
    spread = operator.interval(node, [Interval(-form.rest, form.rest) for form in inputs], tp_group)
    # Without a constant, the slopes need no correction.
    return AffineForm(values[:batch], slopes, spread.radius + torch.where(constant == 0, 0.0, lost))


def _relaxed(
    network: Network, node: Node, relaxed: Relaxed, inputs: Sequence[AffineForm], bounds: Sequence[Interval]
) -> AffineForm:
    """Return a form along parallel lines around the function, or its range if there are none."""
    if isinstance(relaxed, LinesOfDifference):
        return _of_difference(node, relaxed, inputs)
    if not isinstance(relaxed, Relaxation):
        reach = network.operator_of(node).interval(node, bounds, network.tp_group)
        slopes = inputs[0].slopes.new_zeros(*inputs[0].slopes.shape[:2], *node.shape)
        return AffineForm(reach.centre, slopes, reach.radius)
    slope, band = _parallel(network, node, relaxed, bounds[0])
    form = inputs[0]
    return AffineForm(
        slope * form.centre + band.centre, slope.unsqueeze(1) * form.slopes, slope.abs() * form.rest + band.radius
    )


def _of_difference(node: Node, relaxed: LinesOfDifference, inputs: Sequence[AffineForm]) -> AffineForm:
    """Return a form along parallel lines around the larger of two values: shares of both operands, that add up to 1."""
    lines = relaxed.lines
    assert isinstance(lines, Relaxation)
    assert lines.upper_intercept is not None
    share, band = lines.upper_slope, lines.upper_intercept
    batch, count = inputs[0].slopes.shape[:2]
    centre, slopes, rest = band / 2, inputs[0].slopes.new_zeros(batch, count, *node.shape), band.abs() / 2
    variable = iter(inputs[1:])
    for name, part in (("self", share), ("other", 1 - share)):
        if not node.is_variable(name):
            constant = operand(node, name, part)
            centre = centre + torch.where(part == 0, 0.0, part * constant)
            continue
        form = next(variable)
        aligned = (1,) * (len(node.shape) - form.centre.dim() + 1)
        centre = centre + part * form.centre.reshape(-1, *aligned, *form.centre.shape[1:])
        slopes = slopes + part.unsqueeze(1) * form.slopes.reshape(batch, count, *aligned, *form.centre.shape[1:])
        rest = rest + part.abs() * form.rest.reshape(-1, *aligned, *form.rest.shape[1:])
    return AffineForm(centre, slopes, rest)


def _parallel(network: Network, node: Node, relaxed: Relaxation, bounds: Interval) -> tuple[Tensor, Interval]:
    """Return a slope k and the range of f(z) − k·z."""
    nothing = torch.zeros_like(relaxed.lower_slope)
    below = nothing if relaxed.lower_intercept is None else relaxed.lower_intercept
    above = nothing if relaxed.upper_intercept is None else relaxed.upper_intercept
    if network.operator_of(node).pieces(node) is not None:
        # It is convex and 0 at 0: every line through 0 with a slope between those of its pieces is below it.
        return relaxed.upper_slope, Interval(nothing, above)
    slope = (relaxed.lower_slope + relaxed.upper_slope) / 2
    half = (relaxed.upper_slope - relaxed.lower_slope) / 2
    middle, radius = half * bounds.centre, half.abs() * bounds.radius
    return slope, Interval(below - middle - radius, above + middle + radius)


def _tightened_by_rows(backward: Pass, node: Node, options: BoundOptions) -> Interval:
    """Return the bounds of a node's input, met with rows of a backward pass for entries open in some instance.

    With more than ``MOST_ROWS`` of them the bounds stay as they are.
    """
    network, name = backward.network, node.inputs[0]
    before = backward.intervals[name]
    known = [backward.intervals[each] for each in node.inputs]
    wanted = by_instance(network.operator_of(node).unstable_on(node, known)[0])
    (index,) = wanted.any(dim=0).nonzero(as_tuple=True)
    if not len(index) or len(index) > MOST_ROWS:
        return before
    lower, upper = by_instance(before.lower).clone(), by_instance(before.upper).clone()
    pairs = max(1, passing_at_once(backward, name, 2 * len(index), options) // 2)

    def settle(rows: slice) -> None:
        part = index[rows]
        low, high = backward.lower_bounds(name, IdentityRows(part[None])).chunk(2, dim=1)
        found = Interval(low, -high).meet(Interval(lower[:, part], upper[:, part]))
        lower[:, part], upper[:, part] = found.lower, found.upper

    parts_of_rows(backward, len(index), pairs, settle)
    return Interval(lower.view_as(before.lower), upper.view_as(before.upper))
