"""Interval bound propagation (Gowal et al., 2018); the last linear layers are merged with the rows asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from service.bounds.effort import Effort
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.methods.base import LinearAnalysis
from service.bounds.methods.layers import Choose, one_pass
from service.bounds.methods.passes import Passes
from service.bounds.network import Network


def propagate(network: Network, box: Interval) -> dict[str, Interval]:
    """Intervals of every node; inputs of non-linear nodes are equal to the last bit where they are replicated."""
    known = {network.graph.input.name: box}
    relaxed = {name for node in network.nonlinear for name in node.inputs}
    first = set(network.nonlinear[0].inputs) if network.nonlinear and not box.exact_layers else set()
    for node in network.graph.nodes[1:]:
        bounds = network.interval(node, known)
        if node.name in first:
            bounds = bounds.meet(_without_relaxation(network, known, node))
        known[node.name] = network.agreed(node.name, bounds) if node.name in relaxed else bounds
    return known


def _without_relaxation(network: Network, known: Mapping[str, Interval], node: Node) -> Interval:
    """What a box around the input would lose: bounds of a value that only linear operators lead to."""
    batch = len(known[network.graph.input.name].lower)
    index = torch.arange(node.size, device=known[network.graph.input.name].lower.device)[None]
    return one_pass(Pass(network, known, {}), node.name, index, Effort()).map(lambda end: end.view(batch, *node.shape))


def inputs_of(network: Network, intervals: Mapping[str, Interval]) -> dict[str, tuple[Interval, ...]]:
    """Bounds on the inputs of the non-linear nodes."""
    return {node.name: tuple(intervals[name] for name in node.inputs) for node in network.nonlinear}


def _bounded(network: Network, box: Interval, effort: Effort, choose: Choose) -> LinearAnalysis:
    intervals = propagate(network, box)
    if effort.progress is not None:
        effort.progress.start(network, ())
    frontier = frozenset(node.name for node in network.nonlinear)
    return LinearAnalysis(Pass(network, intervals, {}, frontier), inputs_of(network, intervals), effort)


ibp = Passes("ibp", _bounded)
