"""Gives the relaxations of a network over a ball their offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.bounds.balls import Ball
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.near.offsets import NearPieces, NearRelaxed, near_family
from service.bounds.near.values import Near, near_values
from service.bounds.network import Network
from service.bounds.relaxation import Family, Relaxed


@dataclass(frozen=True, eq=False)
class NearLayers:
    """What is known of the distances of a network's values, by name; nothing over a box or part of a network."""

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
