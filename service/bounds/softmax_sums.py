"""Networks whose relaxations know that entries of a value add up to one, such as those of a softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from service.bounds.graph import PRODUCT, Graph, Node
from service.bounds.network import Network
from service.bounds.operators.base import NonlinearOperator
from service.bounds.operators.softmax import SoftmaxProduct

RECIPROCAL, SUM = "aten.reciprocal.default", "aten.sum.dim_IntList"


def with_softmax_sums(network: Network) -> Network:
    """Return the same network, whose relaxations know of parts of a sum: for plain bounds, not for rigorous ones."""
    axes = {node.name: found for node in network.graph.nodes[1:] if (found := _axes(network.graph, node))}
    if not axes or type(network) is not Network:
        return network
    return _WithParts(**{each.name: getattr(network, each.name) for each in fields(network)}, axes=axes)


def _axes(graph: Graph, node: Node) -> tuple[int, ...]:
    """Return the dimensions of an instance along which entries of the node add up to one; none if no sum is known."""
    if node.operator != PRODUCT:
        return ()
    nodes = graph.by_name
    for whole, inverse in (node.inputs, node.inputs[::-1]):
        total = nodes[nodes[inverse].inputs[0]] if nodes[inverse].operator == RECIPROCAL else None
        if total is None or total.operator != SUM or total.inputs != (whole,) or not total.arguments["keepdim"]:
            continue
        shape = nodes[whole].shape
        if node.shape == shape and total.shape == nodes[inverse].shape and len(total.shape) == len(shape):
            return tuple(axis for axis, length in enumerate(shape) if total.shape[axis] != length)
    return ()


@dataclass(frozen=True, eq=False)
class _WithParts(Network):
    axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def operator_of(self, node: Node) -> NonlinearOperator:
        return SoftmaxProduct(self.axes[node.name]) if node.name in self.axes else super().operator_of(node)
