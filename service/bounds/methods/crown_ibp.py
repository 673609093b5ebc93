"""Bounds by CROWN-IBP (Zhang et al., 2020): intermediate bounds by intervals, the output by one backward pass."""

from __future__ import annotations

from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.methods.base import LinearAnalysis
from service.bounds.methods.ibp import inputs_of, propagate
from service.bounds.methods.layers import Choose
from service.bounds.methods.passes import Passes
from service.bounds.near import NearLayers
from service.bounds.network import Network
from service.bounds.options import BoundOptions


def _bounded(network: Network, box: Interval, options: BoundOptions, choose: Choose) -> LinearAnalysis:
    intervals = propagate(network, box)
    if options.progress is not None:
        options.progress.start(network, ())
    inputs = inputs_of(network, intervals)
    near = NearLayers.of(network, box)
    relaxations = {
        node.name: near.relaxed(node, bounds, network.operator_of(node).relax_on(node, bounds))
        for node in network.nonlinear
        if (bounds := inputs[node.name])
    }
    return LinearAnalysis(Pass(network, intervals, relaxations), inputs, options)


crown_ibp = Passes("crown-ibp", _bounded)
