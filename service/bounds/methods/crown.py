"""Bounds by CROWN (Zhang et al., 2018): every non-linear operator's input is bounded by its own backward pass."""

from __future__ import annotations

from service.bounds.interval import Interval
from service.bounds.methods.base import LinearAnalysis
from service.bounds.methods.ibp import inputs_of
from service.bounds.methods.layers import Choose, bound_layers, one_pass
from service.bounds.methods.passes import Passes
from service.bounds.network import Network
from service.bounds.options import BoundOptions, affordable


def _bounded(network: Network, box: Interval, options: BoundOptions, choose: Choose) -> LinearAnalysis:
    backward = bound_layers(network, box, options, one_pass, choose, decides=True)
    return LinearAnalysis(backward, inputs_of(network, backward.intervals), options)


crown = Passes("crown", _bounded, affordable)
