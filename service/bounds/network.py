"""A network made ready for bounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from service.bounds.capture import capture
from service.bounds.exchange import Exchange
from service.bounds.graph import Graph, Node
from service.bounds.interval import Interval
from service.bounds.placement import Placement, check_constants, place
from service.bounds.rules import RULES, check
from service.bounds.rules.base import NonlinearRule
from service.parallel.mesh import SINGLE, Axis


@dataclass(frozen=True, eq=False)
class Network:
    """A checked graph with the placement of its values and the ranks that share it."""

    graph: Graph
    placements: Mapping[str, Placement]
    exchange: Exchange
    nodes: Mapping[str, Node] = field(repr=False)

    def is_own(self, name: str) -> bool:
        return self.placements[name] is Placement.OWN

    @property
    def nonlinear(self) -> tuple[Node, ...]:
        """The nodes that are relaxed, in execution order."""
        return tuple(node for node in self.graph.nodes[1:] if isinstance(RULES[node.operator], NonlinearRule))

    def interval(self, node: Node, known: Mapping[str, Interval]) -> Interval:
        """One step of interval propagation; an end that overflow has made meaningless becomes infinite."""
        found = RULES[node.operator].interval(node, [known[name] for name in node.inputs], self.exchange)
        return found.without_nan()

    def rule_of(self, node: Node) -> NonlinearRule:
        """The rule of one of ``nonlinear``."""
        rule = RULES[node.operator]
        assert isinstance(rule, NonlinearRule)
        return rule

    def agreed(self, name: str, bounds: Interval) -> Interval:
        """Bounds of a replicated value, equal to the last bit on all ranks: comparing them decides on relaxations."""
        if self.is_own(name) or self.exchange.axis.size == 1:
            return bounds
        lower, upper = self.exchange.agree(torch.stack([bounds.lower, bounds.upper])).unbind()
        return Interval(lower, upper)


def prepare(module: nn.Module, input_shape: Sequence[int], axis: Axis = SINGLE) -> Network:
    """Trace ``module`` and check that it can be bounded; every rank of ``axis`` calls it with its part of the model.

    ``input_shape`` is that of one instance. Raises
    :class:`~service.bounds.graph.UnsupportedModelError` that names what stands in the way.
    """
    return from_graph(capture(module, input_shape), axis)


def from_graph(graph: Graph, axis: Axis = SINGLE) -> Network:
    """The same for a graph that is there already."""
    check(graph)
    placements, exchange = place(graph), Exchange(axis)
    check_constants(graph, placements, exchange)
    return Network(graph, placements, exchange, graph.by_name)
