"""CROWN-IBP (Zhang et al., 2020): intermediate bounds by intervals, the output by one backward pass."""

from __future__ import annotations

from service.verification.backward import Pass
from service.verification.interval import Interval
from service.verification.methods.base import Analysis, Effort, LinearAnalysis
from service.verification.methods.ibp import inputs_of, propagate
from service.verification.network import Network


def crown_ibp(network: Network, box: Interval, effort: Effort) -> Analysis:
    intervals = propagate(network, box)
    inputs = inputs_of(network, intervals)
    relaxations = {node.name: network.rule_of(node).relax(node, inputs[node.name]) for node in network.nonlinear}
    return LinearAnalysis(Pass(network, intervals, relaxations), inputs, effort)
