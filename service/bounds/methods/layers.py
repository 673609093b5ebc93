"""Bounds layer by layer: the inputs of every non-linear operator first, each by its own backward passes.

Intervals come first and are kept where they are exact (one layer after the input) or where a tighter bound would
change nothing (a ReLU whose sign is known). Where the value is divided over tensor-parallel ranks, each starts with
its own rows; the first collective backward shares them, so that all ranks bound all rows together, and each
keeps its own results: no bound gets looser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.forward import LayerArithmetic, LayerSweep, with_rows
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.leaps import Leap, Tree, leap_over, trees_of
from service.bounds.linear.plain import Pass
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.methods.base import elements_of_row, fitting, joined, parts_of_rows
from service.bounds.methods.row_groups import RowGroup, row_groups
from service.bounds.near import NearLayers
from service.bounds.network import Network
from service.bounds.operators import OPERATORS
from service.bounds.operators.elementwise import Elementwise
from service.bounds.operators.moves import Expand, Permute, Select, Slice
from service.bounds.options import BoundOptions
from service.bounds.progress import ProgressMeter
from service.bounds.relaxation import Relaxed

Refine = Callable[[Pass, str, Tensor, BoundOptions], Interval]
"""``(backward, name, index, options)``: bounds ``(batch, rows)`` of the entries ``index`` ``(batch or 1, rows)`` of a
node's value."""
Choose = Callable[[Pass, Node, int], tuple[Tensor, Tensor]]
"""``(backward, node, index of an input)`` to the result of :func:`wanted_rows`, for all entries that matter or some
of them.
"""


def wanted_entries(backward: Pass, node: Node, index_of_input: int) -> Tensor:
    """Return which entries of an input matter and have no bounds by a row yet, bool ``(batch, n)``."""
    network, name = backward.network, node.inputs[index_of_input]
    known = [backward.intervals[each] for each in node.inputs]
    wanted = by_instance(network.operator_of(node).unstable_on(node, known)[index_of_input])
    if (needed := network.needed.get(name)) is not None:
        wanted = wanted & needed
    settled = backward.settled.get(name)
    return wanted if settled is None else wanted & ~settled


def wanted_rows(backward: Pass, node: Node, index_of_input: int) -> tuple[Tensor, Tensor]:
    """Return which entries of an input matter, bool ``(batch, n)``, and their numbers, ``(batch or 1, rows)``.

    Each instance has its own rows, padded with entries that it does not need, or all have the same rows if that
    is hardly more. Each rank has equally many.
    """
    network, name = backward.network, node.inputs[index_of_input]
    wanted = wanted_entries(backward, node, index_of_input)
    if len(wanted) == 1 and not network.is_own(name):
        return wanted, wanted[0].nonzero().mT
    anywhere = wanted.any(dim=0, keepdim=True)
    most, union = (int(count) for count in torch.stack([wanted.sum(dim=1).amax(), anywhere.sum()]).tolist())
    if network.is_own(name):
        most, union = (network.tp_group.largest(count, wanted.device) for count in (most, union))
    chosen, count = (wanted, most) if most < union * PER_INSTANCE else (anywhere, union)
    return wanted, numbers(chosen, count)


FEW_LAYERS, SAMPLED = (3, 6, 12), 64
"""Numbers of layers through which a pass goes back to settle signs, the smallest first, and entries that estimate the
share of settled signs.
"""
WORTH_DECIDING, WORTH_SHARE = 2**24, 0.3
"""Coefficients of all rows, and share of settled signs, below which whole passes are as good."""
PER_INSTANCE = 0.8
"""Share of rows below which separate rows pay: common rows of a layer start as its weights, without a batch."""


def numbers(chosen: Tensor, count: int) -> Tensor:
    """Return ``(batch or 1, count)``, of entries that are chosen first."""
    return chosen.byte().argsort(dim=1, descending=True, stable=True)[:, :count]


def bound_layers(
    network: Network,
    box: Interval,
    options: BoundOptions,
    refine: Refine,
    choose: Choose = wanted_rows,
    *,
    decides: bool = False,
    screens: bool = False,
) -> Pass:
    """Return a pass that has the intervals of every node and the relaxations of all non-linear ones.

    With ``decides``, signs that a pass through a few layers settles get no rows through all of them; with ``screens``,
    ``refine`` gets no entries that plain rows settle.
    """
    intervals, relaxations, settled = {network.graph.input.name: box}, dict[str, Relaxed](), dict[str, Tensor]()
    leaps = dict[str, Leap]()
    backward = Pass(network, intervals, relaxations, divided=True, settled=settled, leaps=leaps)
    depth = network.planned(_depths)
    exact = {name for name, mixing in depth.items() if mixing <= box.exact_layers}
    is_free = options.intersect and network.is_alone and box.lower.device.type == "cpu" and not torch.is_grad_enabled()
    if options.progress is not None:
        options.progress.start(network, network.preactivations - exact)
    arithmetic = PlainLayers(
        backward,
        intervals,
        relaxations,
        NearLayers.of(network, box),
        settled,
        options,
        refine,
        choose,
        depth if decides and is_free else {},
        network.planned(trees_of) if is_free else {},
        leaps,
        screens and options.intersect,
    )
    by_rows = network.preactivations - exact
    LayerSweep(network, intervals, arithmetic, by_rows, intersect=options.intersect, progress=options.progress).run()
    return backward


@dataclass(eq=False)
class PlainLayers(LayerArithmetic):
    """Bounds by rows of the plain pass ``backward``, and fills in its intervals, relaxations and steps over several
    nodes.
    """

    backward: Pass
    intervals: dict[str, Interval]
    relaxations: dict[str, Relaxed]
    near: NearLayers
    settled: dict[str, Tensor]
    options: BoundOptions
    refine: Refine
    choose: Choose
    depth: Mapping[str, int]
    trees: Mapping[str, Tree]
    leaps: dict[str, Leap]
    screens: bool = False

    @property
    def network(self) -> Network:
        return self.backward.network

    def wanted_rows(self, node: Node, index: int) -> tuple[Tensor, Tensor]:
        name = node.inputs[index]
        if self.depth and self.network.operator_of(node).breakpoint(node, index) is not None:
            self._decide(node, index)
        wanted, rows = self.choose(self.backward, node, index)
        if self.screens and rows.shape[1]:
            self._tighten(self.backward, name, wanted, rows)
            wanted, rows = self.choose(self.backward, node, index)
        self.settled[name] = wanted | self.settled[name] if name in self.settled else wanted
        return wanted, rows

    def bounds_of_entries(self, name: str, index: Tensor) -> Interval:
        return self.refine(self.backward, name, index, self.options)

    def interval(self, node: Node) -> Interval:
        found = self.network.interval(node, self.intervals)
        if self.options.intersect and (settled := self._settled_through(node)) is not None:
            self.settled[node.name] = settled
        return found

    def _settled_through(self, node: Node) -> Tensor | None:
        """Return the entries of a value that are functions of one settled entry each, so that no linear bound
        is tighter than their interval; ``None`` if there are none.
        """
        operator, before = OPERATORS[node.operator], self.settled.get(node.inputs[0])
        if before is None or len(set(node.inputs)) > 1 or operator.mixes(node):
            return None
        is_in_place = operator.keeps_order or (isinstance(operator, Elementwise) and node.shape == node.input_shapes[0])
        return before if is_in_place else self._move_entries(node, before)

    def _move_entries(self, node: Node, before: Tensor) -> Tensor | None:
        """Return entries in the positions to which an operator moves them."""
        if not isinstance(OPERATORS[node.operator], Permute | Slice | Select | Expand):
            return None
        marked = Interval.point(before.reshape(-1, *node.input_shapes[0]).to(self.backward.like.dtype))
        return by_instance(self.network.interval(node, {node.inputs[0]: marked}).lower) > 0

    def relax(self, node: Node, bounds: Sequence[Interval]) -> None:
        relaxed = self.network.operator_of(node).relax_on(node, bounds)
        self.relaxations[node.name] = self.near.relaxed(node, bounds, relaxed)
        tree = self.trees.get(node.name)
        if tree is not None and (leap := leap_over(self.network, tree, self.relaxations)) is not None:
            self.leaps[node.name] = leap

    def _decide(self, node: Node, index: int) -> None:
        """Tighten bounds by passes that end a few layers earlier, as long as that settles the signs of many entries.

        A known sign leaves nothing to relax, whatever the bounds are.
        """
        name, each = node.inputs[index], 2 * elements_of_row(self.backward, node.inputs[index])
        for layers in FEW_LAYERS:
            first = self.depth[name] - layers
            if first <= layers or self.network.nodes[name].size * each < WORTH_DECIDING:
                return
            wanted, rows = wanted_rows(self.backward, node, index)
            if rows.shape[1] * each < WORTH_DECIDING:
                return
            few = replace(
                self.backward, frontier=frozenset(each for each, depth in self.depth.items() if depth <= first)
            )
            some = rows[:, :: max(1, rows.shape[1] // SAMPLED)]
            self._tighten(few, name, wanted, some)
            is_open = wanted_entries(self.backward, node, index).gather(1, some.expand(len(wanted), -1))
            if float(is_open.float().mean()) <= 1 - WORTH_SHARE:
                wanted, rows = wanted_rows(self.backward, node, index)
                self._tighten(few, name, wanted, rows)

    def _tighten(self, few: Pass, name: str, wanted: Tensor, index: Tensor) -> None:
        if index.shape[1]:
            rows = one_pass(few, name, index, self.options)
            intersect = self.options.intersect
            tightened = with_rows(self.intervals[name], wanted, index, rows, intersect=intersect)
            # The choice of the rows that are left must not differ among the ranks by a last bit.
            self.intervals[name] = self.network.agreed(name, tightened)


def one_pass(backward: Pass, name: str, index: Tensor, options: BoundOptions) -> Interval:
    """Bound both sides of the entries by plain backward passes."""
    rows = row_groups(backward, name, index)
    most = options.passing(2 * index.shape[1] * elements_of_row(backward, name))
    found = [part for group in rows.groups for part in _bounds_of_group(backward, name, group, most, options.progress)]
    halves = [each.chunk(2, dim=1) for each in found]
    low, high = (joined(side) for side in zip(*halves, strict=True))
    return Interval(rows.ordered(low), -rows.ordered(high))


def _bounds_of_group(
    backward: Pass, name: str, group: RowGroup, most: int, progress: ProgressMeter | None
) -> list[Tensor]:
    count, pairs = group.index.shape[1], max(1, fitting(backward.device, group.elements, most) // 2)
    if backward.device.type == "cuda":  # a small last part would take as many launches as a large one
        pairs = -(-count // -(-count // pairs))

    def bounds(part: slice) -> Tensor:
        found = backward.lower_bounds(name, IdentityRows(group.index[:, part], block=group.block))
        if progress is not None:
            progress.add(name, found.shape[1], backward.device)
        return found

    return parts_of_rows(backward, count, pairs, bounds)


def _depths(network: Network) -> dict[str, int]:
    """Return the largest number of operators that mix entries between the input and each value."""
    depth = {network.graph.input.name: 0}
    for node in network.graph.nodes[1:]:
        depth[node.name] = max(depth[name] for name in node.inputs) + OPERATORS[node.operator].mixes(node)
    return depth
