"""The relaxations that the domains of a search choose from, and where their parameters stand in one row.

All domains have parameters for the same entries, those that are open at the root, whatever they are clipped to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.relaxation import Family, Relaxed
from service.bounds.split import PiecewiseSlopes, Places

Bounds = Mapping[str, Interval]
"""Bounds of the values that non-linear operators read, by value."""


class SlopeParameters:
    """Parameters of the non-linear operators ``nodes``, whose inputs have the bounds ``root`` of one instance."""

    def __init__(self, network: Network, nodes: Sequence[Node], root: Bounds) -> None:
        self.network, self.nodes = network, nodes
        unstable = {
            node.name: network.operator_of(node).unstable_on(node, [root[value] for value in node.inputs])[0]
            for node in nodes
        }
        self._open = {name: Places.of(entries) for name, entries in unstable.items()}
        self.tighten(root)

    def tighten(self, root: Bounds) -> None:
        """Take other bounds of the root, within those before: parameters keep their meaning."""
        self._starts = {name: family.start for name, family in self.families(root).items()}

    @property
    def start(self) -> Tensor:
        """Return CROWN's own slopes as parameters, ``(roots, parameters)``; one row where all roots share them."""
        each = [start.flatten(1) for starts in self._starts.values() for start in starts]
        return torch.cat(each, dim=1) if each else torch.zeros(1, 0)

    @property
    def common(self) -> Tensor:
        """Return which parameters, bool ``(parameters,)``, are of operators that all tensor-parallel ranks have."""
        flags = [
            torch.full((start[0].numel(),), not self.network.is_own(name), device=start.device)
            for name, starts in self._starts.items()
            for start in starts
        ]
        return torch.cat(flags) if flags else torch.zeros(0, dtype=torch.bool)

    def families(self, bounds: Bounds) -> dict[str, Family]:
        """Return the family of each operator on these bounds, by node."""
        return {node.name: self._family(node, [bounds[value] for value in node.inputs]) for node in self.nodes}

    def members(self, families: Mapping[str, Family], parameters: Tensor) -> dict[str, Relaxed]:
        """Return the relaxations that rows ``(n, parameters)`` choose, by node."""
        return {name: families[name].member(own) for name, own in self._by_node(parameters)}

    def relaxations(self, families: Mapping[str, Family], parameters: Tensor) -> dict[str, Relaxed]:
        """Return the same relaxations, in a form that serves only for a pass through them."""
        found: dict[str, Relaxed] = {}
        for name, own in self._by_node(parameters):
            family = families[name]
            found[name] = family.fused_member(own) if isinstance(family, PiecewiseSlopes) else family.member(own)
        return found

    def _by_node(self, parameters: Tensor) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Yield every node's share, ``(n, 1, *any)`` as its family takes it."""
        sizes = [start[0].numel() for starts in self._starts.values() for start in starts]
        parts = iter(torch.split(parameters, sizes, dim=1)) if sizes else iter(())
        for name, starts in self._starts.items():
            yield name, tuple(next(parts).reshape(len(parameters), 1, *start.shape[1:]) for start in starts)

    def _family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        operator = self.network.operator_of(node)
        pieces = operator.pieces(node)
        if pieces is not None:
            return PiecewiseSlopes.on(pieces, bounds[0], self._open[node.name])
        return operator.family(node, bounds)
