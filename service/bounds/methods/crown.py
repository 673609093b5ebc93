"""CROWN (Zhang et al., 2018): every non-linear operator's input is bounded by a backward pass of its own.

Intervals come first and are kept where they are exact (one layer after the input) or where a tighter bound would
change nothing (a ReLU whose sign is known). Where the value is divided over tensor-parallel ranks, each starts with
its own rows; the first collective backward makes them everybody's, so that all ranks bound all rows together, and
each keeps its own results: nothing is replaced by a looser bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from service.bounds.backward import Pass
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.methods.base import Analysis, Effort, LinearAnalysis, rows_at_once
from service.bounds.methods.ibp import inputs_of
from service.bounds.network import Network
from service.bounds.relaxation import Relaxed
from service.bounds.rules import RULES
from service.bounds.rules.base import UnitRows


def crown(network: Network, box: Interval, effort: Effort) -> Analysis:
    intervals = {network.graph.input.name: box}
    relaxations: dict[str, Relaxed] = {}
    backward = Pass(network, intervals, relaxations)
    exact = _exact_intervals(network)
    refined: set[str] = set()
    for node in network.graph.nodes[1:]:
        if node in network.nonlinear:
            for index, name in enumerate(node.inputs):
                if name not in refined:
                    refined.add(name)
                    intervals[name] = network.agreed(name, intervals[name])
                    if name not in exact:
                        intervals[name] = network.agreed(name, _refine(backward, node, index, effort))
            bounds = [intervals[name] for name in node.inputs]
            relaxations[node.name] = network.rule_of(node).relax_on(node, bounds)
        intervals[node.name] = network.interval(node, intervals)
    return LinearAnalysis(backward, inputs_of(network, intervals), effort)


def _exact_intervals(network: Network) -> set[str]:
    """Values whose intervals are exact: at most one operator between the input and them mixes entries."""
    depth = {network.graph.input.name: 0}
    for node in network.graph.nodes[1:]:
        depth[node.name] = max(depth[name] for name in node.inputs) + RULES[node.operator].mixes(node)
    return {name for name, mixing in depth.items() if mixing <= 1}


def _refine(backward: Pass, node: Node, index_of_input: int, effort: Effort) -> Interval:
    """Tighter bounds on an input of ``node``, entry by entry where they matter to the instance."""
    network, name = backward.network, node.inputs[index_of_input]
    before = backward.intervals[name]
    known = [backward.intervals[each] for each in node.inputs]
    wanted = network.rule_of(node).improvable_on(node, known)[index_of_input]
    index = _rows(network, name, wanted)
    if not len(index):
        return before
    lower, upper = before.lower.flatten(1).clone(), before.upper.flatten(1).clone()
    pairs = max(1, rows_at_once(network, name, len(lower), effort) // 2)
    for part in torch.split(index, pairs):
        bounds = backward.lower_bounds(name, UnitRows(part))
        lower[:, part], upper[:, part] = bounds[:, : len(part)], -bounds[:, len(part) :]
    found = Interval(lower.view_as(before.lower), upper.view_as(before.upper))
    if effort.intersect:
        found = found.meet(before)
    return Interval(torch.where(wanted, found.lower, before.lower), torch.where(wanted, found.upper, before.upper))


def _rows(network: Network, name: str, wanted: Tensor) -> Tensor:
    """Entries that any instance wants, int64 ``(rows,)``: as many on each rank, filled up with the first entry."""
    index = wanted.flatten(1).any(dim=0).nonzero().squeeze(1)
    if not network.is_own(name):
        return index
    count = network.exchange.largest(len(index), index.device)
    return torch.cat([index, index.new_zeros(count - len(index))])
