"""Bounds layer by layer: the inputs of every non-linear operator first, each by backward passes of its own.

Intervals come first and are kept where they are exact (one layer after the input) or where a tighter bound would
change nothing (a ReLU whose sign is known). Where the value is divided over tensor-parallel ranks, each starts with
its own rows; the first collective backward makes them everybody's, so that all ranks bound all rows together, and
each keeps its own results: nothing is replaced by a looser bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.forward import ForwardTraversal
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.methods.base import parts_of_rows, passing_at_once
from service.bounds.network import Network
from service.bounds.operators import OPERATORS
from service.bounds.options import BoundOptions
from service.bounds.relaxation import Relaxed

Refine = Callable[[Pass, str, Tensor, BoundOptions], Interval]
"""``(backward, name, index, options)``: bounds ``(batch, rows)`` of the entries ``index`` ``(batch or 1, rows)`` of a
node's value."""
Choose = Callable[[Pass, Node, int], tuple[Tensor, Tensor]]
"""``(backward, node, index of an input)``: what :func:`wanted_rows` gives, of all that matter or of some of them."""


def wanted_entries(backward: Pass, node: Node, index_of_input: int) -> Tensor:
    """Return which entries of an input matter, bool ``(batch, n)``."""
    known = [backward.intervals[each] for each in node.inputs]
    return backward.network.operator_of(node).unstable_on(node, known)[index_of_input].flatten(1)


def wanted_rows(backward: Pass, node: Node, index_of_input: int) -> tuple[Tensor, Tensor]:
    """Return which entries of an input matter, bool ``(batch, n)``, and their numbers, ``(batch or 1, rows)``.

    Rows are those of each instance, filled up with entries that it does not need, or the same for all where that is
    hardly more. There are as many on each rank.
    """
    network, name = backward.network, node.inputs[index_of_input]
    wanted = wanted_entries(backward, node, index_of_input)
    anywhere = wanted.any(dim=0, keepdim=True)
    most, union = (int(count) for count in torch.stack([wanted.sum(dim=1).amax(), anywhere.sum()]).tolist())
    if network.is_own(name):
        most, union = (network.tp_group.largest(count, wanted.device) for count in (most, union))
    chosen, count = (wanted, most) if most < union * PER_INSTANCE else (anywhere, union)
    return wanted, numbers(chosen, count)


PER_INSTANCE = 0.8
"""Rows of their own are worth it below this share: common rows of a layer start as its weights, without a batch."""


def numbers(chosen: Tensor, count: int) -> Tensor:
    """Return ``(batch or 1, count)``, of entries that are chosen first."""
    return chosen.byte().argsort(dim=1, descending=True, stable=True)[:, :count]


def bound_layers(
    network: Network, box: Interval, options: BoundOptions, refine: Refine, choose: Choose = wanted_rows
) -> Pass:
    """Return a pass that has the intervals of every node and the relaxations of all non-linear ones."""
    intervals, relaxations = {network.graph.input.name: box}, dict[str, Relaxed]()
    backward = Pass(network, intervals, relaxations, divided=True)
    exact = _exact_intervals(network, box.exact_layers)
    if options.progress is not None:
        options.progress.start(network, network.preactivations - exact)
    _LayerBounds(network, intervals, backward, relaxations, options, refine, choose, exact).run()
    return backward


@dataclass(eq=False)
class _LayerBounds(ForwardTraversal):
    """Bound what non-linear nodes read by rows of ``backward``, except for ``exact`` intervals, and relax the nodes."""

    backward: Pass
    relaxations: dict[str, Relaxed]
    options: BoundOptions
    refine_rows: Refine
    choose: Choose
    exact: set[str]

    def refine(self, node: Node, index: int) -> None:
        name = node.inputs[index]
        if name not in self.exact:
            refined = self._tightened_by_rows(name, *self.choose(self.backward, node, index))
            self.intervals[name] = self.network.agreed(name, refined)

    def relax(self, node: Node) -> None:
        bounds = self.bounds_of_inputs(node)
        self.relaxations[node.name] = self.network.operator_of(node).relax_on(node, bounds)

    def _tightened_by_rows(self, name: str, wanted: Tensor, index: Tensor) -> Interval:
        """Return tighter bounds of a value, entry by entry where they matter to the instance."""
        before, options = self.intervals[name], self.options
        if options.progress is not None:
            options.progress.expect(name, 2 * index.shape[1])
        if not index.shape[1]:
            return before
        rows = self.refine_rows(self.backward, name, index, options)
        flat, everyone = before.map(lambda end: end.flatten(1)), index.expand(len(wanted), -1)
        if options.intersect:
            rows = rows.meet(flat.map(lambda end: end.gather(1, everyone)))
        lower, upper = (
            torch.where(wanted, old.scatter(1, everyone, new), old)
            for old, new in ((flat.lower, rows.lower), (flat.upper, rows.upper))
        )
        return Interval(lower.view_as(before.lower), upper.view_as(before.upper))


def one_pass(backward: Pass, name: str, index: Tensor, options: BoundOptions) -> Interval:
    """Bound both sides of the entries by plain backward passes."""
    pairs = max(1, passing_at_once(backward, name, 2 * index.shape[1], options) // 2)

    def bounds(part: slice) -> Tensor:
        found = backward.lower_bounds(name, IdentityRows(index[:, part]))
        if options.progress is not None:
            options.progress.add(name, found.shape[1], backward.device)
        return found

    found = parts_of_rows(backward, index.shape[1], pairs, bounds)
    halves = [each.chunk(2, dim=1) for each in found]
    return Interval(torch.cat([low for low, _ in halves], dim=1), -torch.cat([high for _, high in halves], dim=1))


def _exact_intervals(network: Network, layers: int) -> set[str]:
    """Return the values with exact intervals: at most ``layers`` operators between the input and them mix entries."""
    depth = {network.graph.input.name: 0}
    for node in network.graph.nodes[1:]:
        depth[node.name] = max(depth[name] for name in node.inputs) + OPERATORS[node.operator].mixes(node)
    return {name for name, mixing in depth.items() if mixing <= layers}
