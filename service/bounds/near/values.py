"""Bounds how far the values of each layer are from those of a ball's middle, in Euclidean distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from service.bounds.balls import Ball
from service.bounds.flat import by_instance
from service.bounds.interval import Interval
from service.bounds.network import Network

SLACK = 2.0**-20
"""The share by which distances are enlarged, for the rounding of norms and of their products."""


@dataclass(frozen=True, eq=False)
class Near:
    """Values at a Euclidean distance of at most ``radius`` ``(batch,)`` from ``centre`` ``(batch, *shape)``."""

    centre: Tensor
    radius: Tensor


@torch.no_grad()
def near_values(network: Network, ball: Ball) -> Mapping[str, Near]:
    """Return all values of a network, by name, whose distance from those of the middle is known.

    A node's own distance is at most its stretch, a Lipschitz constant, times that of all of its inputs together.
    """
    first = network.graph.input.name
    points = {first: Interval.point(ball.middle)}
    found = {first: Near(ball.middle, ball.euclidean_size)}
    for node in network.graph.nodes[1:]:
        centre = network.interval(node, points).centre
        points[node.name] = Interval.point(centre)
        each = [found[name].radius for name in node.inputs if name in found]
        stretch = network.stretches.get(node.name, inf)
        if stretch < inf and len(each) == len(node.inputs):
            # Centres are computed, so they are rounded.
            rounding = by_instance(centre).norm(dim=1) * 8 * torch.finfo(centre.dtype).eps
            radius = torch.stack(each).norm(dim=0) * (stretch * (1 + SLACK)) + rounding
            found[node.name] = Near(centre, radius)
    return found
