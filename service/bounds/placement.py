"""Which values of a graph are replicated over the tensor-parallel group and which are a rank's own."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.graph import Graph, Node, UnsupportedModelError
from service.bounds.rules import RULES
from service.bounds.rules.base import Crossing


class Placement(Enum):
    """``OWN``: each rank has values of its own, and coefficients that only its own part of a bound has.

    They are shards, summands of a value that a collective will sum, or all shards joined for work that differs by rank.
    """

    REPLICATED = "replicated"
    OWN = "own"


_BEFORE = {Crossing.ENTER: Placement.REPLICATED, Crossing.LEAVE: Placement.OWN, Crossing.WITHIN: Placement.OWN}
_AFTER = {Crossing.ENTER: Placement.OWN, Crossing.LEAVE: Placement.REPLICATED, Crossing.WITHIN: Placement.OWN}


def place(graph: Graph) -> Mapping[str, Placement]:
    """The placement of every node of a whole model, which is replicated at both ends.

    Raises :class:`UnsupportedModelError`, see :func:`place_part`.
    """
    placements = place_part(graph, Placement.REPLICATED)
    if placements[graph.output.name] is Placement.OWN:
        raise UnsupportedModelError(
            "the model's output is divided over the tensor-parallel ranks; it must be replicated"
        )
    return placements


def place_part(graph: Graph, entering: Placement) -> Mapping[str, Placement]:
    """The placement of every node from that of the input; only collectives change it, and no operator mixes the two.

    Raises :class:`UnsupportedModelError` for a graph that is not divided this way, since its bounds would count a
    replicated value once per rank.
    """
    placements = {graph.input.name: entering}
    for node in graph.nodes[1:]:
        placements[node.name] = _place(node, [placements[name] for name in node.inputs])
    return placements


def entering(graph: Graph) -> Placement:
    """The placement that the input of a pipeline stage has: the one that the stage's first collective needs."""
    crossings = (RULES[node.operator].crossing for node in graph.nodes[1:])
    first = next((crossing for crossing in crossings if crossing is not None), Crossing.ENTER)
    return _BEFORE[first]


def _place(node: Node, inputs: list[Placement]) -> Placement:
    crossing = RULES[node.operator].crossing
    before = inputs[0] if crossing is None else _BEFORE[crossing]
    if any(placement is not before for placement in inputs):
        found = ", ".join(f"{name} is {placement.value}" for name, placement in zip(node.inputs, inputs, strict=True))
        raise UnsupportedModelError(f"{node} needs {before.value} inputs on every tensor-parallel rank, but {found}")
    return before if crossing is None else _AFTER[crossing]


def check_constants(graph: Graph, placements: Mapping[str, Placement], exchange: Exchange) -> None:
    """Refuse constants that differ between ranks where the graph says that all ranks do the same; all ranks call it."""
    used = [
        (node, value)
        for node in graph.nodes
        if placements[node.name] is Placement.REPLICATED
        for value in node.arguments.values()
        if isinstance(value, Tensor)
    ]
    equal = exchange.same_everywhere([value for _, value in used])
    for (node, _), same in zip(used, equal, strict=True):
        if not same:
            raise UnsupportedModelError(
                f"{node} uses a constant that differs between tensor-parallel ranks, outside of any "
                "copy_to_group … reduce_from_group region: the model forgot a collective"
            )
