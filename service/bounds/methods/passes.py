"""Runs methods that need only intervals and backward passes, whose steps depend little on the boxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from service.bounds.interval import Interval
from service.bounds.methods.base import LinearAnalysis
from service.bounds.methods.layers import Choose, wanted_rows
from service.bounds.network import Network
from service.bounds.options import BoundOptions


def _whole(network: Network, box: Interval, options: BoundOptions) -> BoundOptions:
    """Return the options as they are, for methods that bound no intermediate rows."""
    return options


@dataclass(frozen=True)
class Passes:
    """A :data:`~service.bounds.methods.base.Bounder`.

    ``bounded`` does the work, with affordable options and a choice of the entries that get a row. ``affordable``
    may query the device, and may communicate between ranks.
    """

    name: str
    bounded: Callable[[Network, Interval, BoundOptions, Choose], LinearAnalysis]
    affordable: Callable[[Network, Interval, BoundOptions], BoundOptions] = _whole

    def __call__(self, network: Network, box: Interval, options: BoundOptions) -> LinearAnalysis:
        return self.bounded(network, box, self.affordable(network, box, options), wanted_rows)
