"""Bounds by intervals and backward passes alone, whose steps depend little on the boxes: IBP, CROWN-IBP and CROWN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from service.bounds.forward import ForwardTraversal, values_of_a_ball
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.methods.base import LinearAnalysis
from service.bounds.methods.layers import Choose, bound_layers, one_pass, wanted_rows
from service.bounds.near import NearLayers
from service.bounds.network import Network
from service.bounds.options import BYTES_FOR_AN_ELEMENT, BYTES_WITHOUT_GRADIENT, BoundOptions, affordable


@dataclass(frozen=True)
class Passes:
    """A :data:`~service.bounds.methods.base.Bounder`.

    ``bounded`` does the work, with affordable options and a choice of the entries that get a row. ``affordable``
    may query the device, and may communicate between ranks; without intermediate rows, options are as they are.
    """

    name: str
    bounded: Callable[[Network, Interval, BoundOptions, Choose], LinearAnalysis]
    affordable: Callable[[Network, Interval, BoundOptions], BoundOptions] = lambda network, box, options: options

    def __call__(self, network: Network, box: Interval, options: BoundOptions) -> LinearAnalysis:
        return self.bounded(network, box, self.affordable(network, box, options), wanted_rows)


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


def _propagate_alone(network: Network, box: Interval, options: BoundOptions) -> dict[str, Interval]:
    intervals = propagate(network, box)
    if options.progress is not None:
        options.progress.start(network, ())
    return intervals


def _bound_by_ibp(network: Network, box: Interval, options: BoundOptions, choose: Choose) -> LinearAnalysis:
    intervals = _propagate_alone(network, box, options)
    frontier = frozenset(node.name for node in network.nonlinear)
    return LinearAnalysis(Pass(network, intervals, {}, frontier), inputs_of(network, intervals), options)


def _bound_by_crown_ibp(network: Network, box: Interval, options: BoundOptions, choose: Choose) -> LinearAnalysis:
    intervals = _propagate_alone(network, box, options)
    inputs, near = inputs_of(network, intervals), NearLayers.of(network, box)
    relaxations = {
        node.name: near.relaxed(node, bounds, network.operator_of(node).relax_on(node, bounds))
        for node in network.nonlinear
        if (bounds := inputs[node.name])
    }
    return LinearAnalysis(Pass(network, intervals, relaxations), inputs, options)


def _affordable(network: Network, box: Interval, options: BoundOptions) -> BoundOptions:
    each = BYTES_FOR_AN_ELEMENT if torch.is_grad_enabled() else BYTES_WITHOUT_GRADIENT
    return affordable(network, box, options, each)


def _bound_by_crown(network: Network, box: Interval, options: BoundOptions, choose: Choose) -> LinearAnalysis:
    backward = bound_layers(network, box, options, one_pass, choose, decides=True)
    return LinearAnalysis(backward, inputs_of(network, backward.intervals), options)


ibp = Passes("ibp", _bound_by_ibp)
"""Interval propagation (Gowal et al., 2018); the last linear layers are merged with the requested rows."""
crown_ibp = Passes("crown-ibp", _bound_by_crown_ibp)
"""CROWN-IBP (Zhang et al., 2020): intermediate bounds by intervals, the output by one backward pass."""
crown = Passes("crown", _bound_by_crown, _affordable)
"""CROWN (Zhang et al., 2018): every non-linear operator's input is bounded by its own backward pass."""
