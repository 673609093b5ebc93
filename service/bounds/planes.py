"""Planes below rows of a folded network's output, over a batch of small boxes: CROWN (Zhang et al., 2018).

Every box has rows of its own, only for the entries that are worth it in that box. Bounds of the box from which
it was cut hold in it too, so an entry that was settled there is not bounded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.flat import by_instance, by_row
from service.bounds.folded import FoldedForm, FoldedNetwork
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import traverse_backward
from service.bounds.relaxation import Relaxation, Relaxed

Known = Mapping[str, Interval]
"""Bounds ``(batch, entries)`` of the values that operators read, by name."""


@dataclass(frozen=True, eq=False)
class Planes:
    """``coefficients · x + bias ≤ rows · output`` in each box: ``(batch, rows, features)``, ``(batch, rows)``.

    ``known`` are bounds of the values that operators read, for the boxes that will be cut from this one.
    ``influence`` ``(batch, rows, features)`` estimates a row's loss to relaxations from the width of each input.
    """

    coefficients: Tensor
    bias: Tensor
    known: Known
    influence: Tensor


@dataclass(frozen=True, eq=False)
class _PendingRows:
    """Coefficients of the same rows on several sources, ``(batch or 1, rows, entries)``, and their bias."""

    coefficients: dict[str, Tensor]
    bias: Tensor


@dataclass(eq=False)
class BoxPlanes:
    """Bound one batch of boxes ``(batch, features)``, operator by operator.

    This is no :class:`~service.bounds.forward.ForwardTraversal`: a folded network has no linear nodes. An
    operator reads a linear form of several earlier outputs, which is bounded, flat, when the operator is
    reached, and refined by rows that differ from box to box.
    """

    folded: FoldedNetwork
    box: Interval
    known: Known

    def planes(self, rows: Tensor) -> Planes:
        """Return planes below rows ``(rows, outputs)``."""
        self._relaxed: dict[str, Relaxed] = {}
        self._values: dict[str, Interval] = {self.folded.input: self.box}
        self._bounds: dict[str, Interval] = {}
        self._slopes: dict[str, Tensor] = {}
        for node in self.folded.nodes:
            self._relax(node)
        form = self.folded.output.rows(rows)
        start = _PendingRows({name: matrix[None] for name, matrix in form.matrices.items()}, form.bias[None])
        coefficients, bias, influence = self._back(start, len(self.folded.nodes))
        if self.folded.network.ranges:
            coefficients, bias = self._no_looser_than_ranges(form, coefficients, bias)
        return Planes(coefficients, bias, self._bounds, influence)

    def _no_looser_than_ranges(self, form: FoldedForm, coefficients: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Replace planes by level ones if the intervals of their sources give tighter bounds."""
        level = form.bias
        for source, matrix in form.matrices.items():
            values = self._values[source]
            level = level + (values.centre @ matrix.mT - values.spread @ matrix.mT.abs())
        level = level.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        is_better = ~(minimum(self.box, coefficients, bias) >= level) & level.isfinite()
        return torch.where(is_better.unsqueeze(2), 0.0, coefficients), torch.where(is_better, level, bias)

    def _relax(self, node: Node) -> None:
        network, batch = self.folded.network, len(self.box.lower)
        operator = network.operator_of(node)
        for name in node.inputs:
            if name not in self._bounds:
                self._bounds[name] = self._propagated(name)
        for index, name in enumerate(node.inputs):
            if name not in self._slopes:
                wanted = operator.unstable_on(node, self._inputs(node))[index].reshape(batch, -1)
                self._refine(name, wanted)
        bounds = self._inputs(node)
        self._relaxed[node.name] = operator.relax_on_small(node, bounds)
        value = operator.interval(node, bounds, network.tp_group).without_nan()
        if node.name in network.ranges:
            shaped = {name: _shaped(each, network.nodes[name].shape) for name, each in self._bounds.items()}
            shaped |= {self.folded.input: _shaped(self.box, network.graph.input.shape)}
            value = network.ranges[node.name].narrowed(value, shaped)
        self._values[node.name] = value.map(lambda end: end.reshape(batch, -1))

    def _inputs(self, node: Node) -> list[Interval]:
        """Return the bounds of a node's inputs in their shapes."""
        pairs = zip(node.inputs, node.input_shapes, strict=True)
        return [_shaped(self._bounds[name], shape) for name, shape in pairs]

    def _propagated(self, name: str) -> Interval:
        form = self.folded.forms[name]
        centre, radius = form.bias, torch.zeros_like(form.bias)
        for source, matrix in form.matrices.items():
            centre = centre + self._values[source].centre @ matrix.mT
            radius = radius + self._values[source].spread @ matrix.mT.abs()
        found = Interval.around(centre, radius)
        found = found.map(lambda end: end.expand(len(self.box.lower), -1))
        return found.meet(self.known[name]) if name in self.known else found

    def _refine(self, name: str, wanted: Tensor) -> None:
        """Bound every wanted entry of every box by a pair of rows, one for each end."""
        form, bounds = self.folded.forms[name], self._bounds[name]
        if set(form.matrices) == {self.folded.input}:
            self._slopes[name] = form.matrices[self.folded.input].expand(len(wanted), -1, -1)
            return
        slopes = self.box.lower.new_zeros(*wanted.shape, self.box.lower.shape[1])
        self._slopes[name] = slopes
        owner, entry = wanted.nonzero(as_tuple=True)
        if not len(owner):
            return
        start = _PendingRows(
            {source: _both(matrix[entry]) for source, matrix in form.matrices.items()}, _both(form.bias[entry])
        )
        coefficients, bias, _ = self._back(start, len(self._relaxed), owner)
        box = self.box.map(lambda end: end[owner])
        least = minimum(box, coefficients, bias).nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        found = Interval(least[:, 0], -least[:, 1]).meet(bounds.map(lambda end: end[owner, entry]))
        lower, upper = bounds.lower.clone(), bounds.upper.clone()
        lower[owner, entry], upper[owner, entry] = found.lower, found.upper
        self._bounds[name] = Interval(lower, upper)
        slopes[owner, entry] = coefficients[:, 0]

    def _back(self, start: _PendingRows, until: int, owner: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        pending, biases = dict(start.coefficients), [start.bias]
        influence = [self.box.lower.new_zeros(1, 1, self.box.lower.shape[1])]

        def propagate(node: Node, coefficients: Tensor) -> Iterable[tuple[str, Tensor]]:
            if owner is None:
                influence.append(self._influence(node, coefficients))
            through, added = self._through(node, coefficients, owner)
            if added is not None:
                biases.append(added)
            for name, rows in zip(node.inputs, through, strict=True):
                form = self.folded.forms[name]
                biases.append(rows @ form.bias)
                for source, matrix in form.matrices.items():
                    yield source, rows @ matrix

        traverse_backward(self.folded.nodes[:until][::-1], pending, propagate, lambda _, earlier, new: earlier + new)
        bias = sum(biases[1:], start=biases[0])
        coefficients = pending.get(self.folded.input)
        if coefficients is None:
            coefficients = bias.new_zeros(*bias.shape, self.box.lower.shape[1])
        batch = len(self.box.lower) if owner is None else len(owner)
        total = sum(influence[1:], start=influence[0])
        return coefficients.expand(batch, -1, -1), bias.expand(batch, -1), total

    def _through(self, node: Node, coefficients: Tensor, owner: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        relaxed = self._relaxed[node.name]
        shaped = coefficients.reshape(*coefficients.shape[:2], *node.shape)
        if isinstance(relaxed, Relaxation):
            chosen = relaxed if owner is None else _owned(relaxed, owner)
            through, added = backward_in_few_steps(chosen, shaped)
            return [by_row(through)], added
        if owner is not None:
            own = [each.map(lambda end: end[owner]) for each in self._inputs(node)]
            relaxed = self.folded.network.operator_of(node).relax_on_small(node, own)
        many, added = relaxed.backward(shaped)
        return [by_row(each) for each in many], added

    def _influence(self, node: Node, coefficients: Tensor) -> Tensor:
        relaxed, weight = self._relaxed[node.name], coefficients.abs()
        nothing = self.box.lower.new_zeros(1, 1, self.box.lower.shape[1])
        if not isinstance(relaxed, Relaxation):
            bounds = [self._bounds[name] for name in node.inputs]
            if any(each.lower.shape[1] != weight.shape[2] for each in bounds):
                return nothing
            gap = bounds[0].width * bounds[-1].width / 4
        else:
            middle = self._bounds[node.inputs[0]].centre.reshape(relaxed.lower_slope.shape)
            above = (relaxed.upper_slope - relaxed.lower_slope) * middle
            if relaxed.upper_intercept is not None:
                above = above + relaxed.upper_intercept
            if relaxed.lower_intercept is not None:
                above = above - relaxed.lower_intercept
            gap = by_instance(above)
        total = nothing
        for name in set(node.inputs):
            share = (gap / self._bounds[name].width.clamp(min=torch.finfo(gap.dtype).tiny)).nan_to_num(posinf=0)
            total = total + torch.bmm(weight * share.unsqueeze(1), self._slopes[name].abs())
        return total


def _shaped(bounds: Interval, shape: Sequence[int]) -> Interval:
    return bounds.map(lambda end: end.reshape(-1, *shape))


def backward_in_few_steps(relaxed: Relaxation, coefficients: Tensor) -> tuple[Tensor, Tensor | None]:
    """Take the step of :meth:`Relaxation.backward` in fewer passes over the coefficients, for small boxes."""
    negative = coefficients.clamp(max=0)
    positive = coefficients - negative
    slopes = relaxed.lower_slope.unsqueeze(1), relaxed.upper_slope.unsqueeze(1)
    through = torch.addcmul(positive * slopes[0], negative, slopes[1])
    bias = None
    if relaxed.upper_intercept is not None:
        bias = _dot(negative, relaxed.upper_intercept)
    if relaxed.lower_intercept is not None:
        above = _dot(positive, relaxed.lower_intercept)
        bias = above if bias is None else bias + above
    return through, bias


def _dot(coefficients: Tensor, intercept: Tensor) -> Tensor:
    return by_row(coefficients * intercept.unsqueeze(1)).sum(dim=2)


def _owned(relaxed: Relaxation, owner: Tensor) -> Relaxation:
    def of(each: Tensor | None) -> Tensor | None:
        return None if each is None else each[owner]

    lower, upper = of(relaxed.lower_intercept), of(relaxed.upper_intercept)
    return Relaxation(relaxed.lower_slope[owner], relaxed.upper_slope[owner], lower, upper)


def _both(rows: Tensor) -> Tensor:
    return torch.stack([rows, -rows], dim=1)


def minimum(box: Interval, coefficients: Tensor, bias: Tensor) -> Tensor:
    """Return the least values of planes over their boxes, ``(batch, rows)``."""
    centre, radius = box.centre.unsqueeze(1), box.spread.unsqueeze(1)
    return (coefficients * centre).sum(dim=2) - (coefficients.abs() * radius).sum(dim=2) + bias
