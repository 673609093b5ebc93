"""Smooth functions whose shape depends on a node's arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.relaxation import Family, Relaxation
from service.bounds.rules.base import NonlinearRule
from service.bounds.rules.smooth import Smooth


class Parametric(NonlinearRule):
    """Each node has a :class:`Smooth` function of its own."""

    @abstractmethod
    def smooth(self, node: Node) -> Smooth:
        """The function of a node."""

    def interval(self, node: Node, inputs: Sequence[Interval], exchange: Exchange) -> Interval:
        return self.smooth(node).interval(node, inputs, exchange)

    def improvable(self, node: Node, bounds: Interval) -> Tensor:
        return self.smooth(node).improvable(node, bounds)

    def relax(self, node: Node, bounds: Interval) -> Relaxation:
        return self.smooth(node).relax(node, bounds)

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        return self.smooth(node).family(node, bounds)
