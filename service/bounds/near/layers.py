"""Bounds how far the values of layers are from those of a middle of a ball, which gives relaxations their offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from service.bounds.balls import Ball
from service.bounds.flat import by_instance
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.near.offsets import NearPieces, NearRelaxed, near_family
from service.bounds.network import Network
from service.bounds.relaxation import Family, Relaxed

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


@dataclass(frozen=True, eq=False)
class NearLayers:
    """What is known of the distances of a network's values, by name; nothing over a box, or if other ranks have a part
    of the network.
    """

    network: Network
    values: Mapping[str, Near]

    @staticmethod
    def of(network: Network, box: Interval) -> NearLayers:
        is_ball = isinstance(box, Ball) and network.is_alone
        return NearLayers(network, near_values(network, box) if is_ball and isinstance(box, Ball) else {})

    def pieces(self, nodes: Sequence[Node], bounds: Mapping[str, Interval]) -> dict[str, NearPieces]:
        """Return what is known of some of the nodes, by name, on these bounds of their inputs, by value."""
        found = ((node.name, self._pieces(node, [bounds[name] for name in node.inputs])) for node in nodes)
        return {name: near for name, near in found if near is not None}

    def relaxed(self, node: Node, bounds: Sequence[Interval], relaxed: Relaxed) -> Relaxed:
        """Return the relaxation of a node on these bounds with its offsets, where there are any."""
        near = self._pieces(node, bounds)
        return relaxed if near is None else NearRelaxed(relaxed, near)

    def family(self, node: Node, bounds: Sequence[Interval], family: Family) -> Family:
        near = self._pieces(node, bounds)
        return family if near is None else near_family(family, near)

    def _pieces(self, node: Node, bounds: Sequence[Interval]) -> NearPieces | None:
        near = self.values.get(node.inputs[0])
        pieces = None if near is None else self.network.operator_of(node).pieces(node)
        if near is None or pieces is None or len(node.inputs) > 1:
            return None
        lower, upper, centre = (each.unsqueeze(1) for each in (bounds[0].lower, bounds[0].upper, near.centre))
        found = NearPieces(pieces.slope, lower, upper, centre, near.radius)
        return None if found.is_idle else found
