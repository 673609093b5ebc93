"""Bounds by interval propagation (Gowal et al., 2018); the last linear layers are merged with the requested rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from service.bounds.forward import ForwardTraversal, values_of_a_ball
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.methods.base import LinearAnalysis
from service.bounds.methods.layers import Choose, one_pass
from service.bounds.methods.passes import Passes
from service.bounds.network import Network
from service.bounds.options import BoundOptions


def propagate(network: Network, box: Interval) -> dict[str, Interval]:
    """Return intervals of every node; replicated inputs of non-linear nodes are equal to the last bit on all ranks."""
    traversal = _IntervalPropagation(network, {network.graph.input.name: box}, values_of_a_ball(network, box))
    traversal.run()
    return traversal.intervals


@dataclass(eq=False)
class _IntervalPropagation(ForwardTraversal):
    ball_values: frozenset[str]

    def propagate(self, node: Node) -> Interval:
        bounds = super().propagate(node)
        return bounds.meet(self._without_relaxation(node)) if node.name in self.ball_values else bounds

    def _without_relaxation(self, node: Node) -> Interval:
        """Return bounds of a value that only linear operators precede, by a pass back to the input."""
        backward = Pass(self.network, self.intervals, {})
        index = torch.arange(node.size, device=backward.device)[None]
        bounds = one_pass(backward, node.name, index, BoundOptions())
        return bounds.map(lambda end: end.view(backward.batch, *node.shape))


def inputs_of(network: Network, intervals: Mapping[str, Interval]) -> dict[str, tuple[Interval, ...]]:
    """Return bounds on the inputs of the non-linear nodes."""
    return {node.name: tuple(intervals[name] for name in node.inputs) for node in network.nonlinear}


def _bounded(network: Network, box: Interval, options: BoundOptions, choose: Choose) -> LinearAnalysis:
    intervals = propagate(network, box)
    if options.progress is not None:
        options.progress.start(network, ())
    frontier = frozenset(node.name for node in network.nonlinear)
    return LinearAnalysis(Pass(network, intervals, {}, frontier), inputs_of(network, intervals), options)


ibp = Passes("ibp", _bounded)
