"""Decides which values of a graph are replicated over the tensor-parallel group and which are a rank's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from service.bounds.graph import Graph, Node, Ref, Repeated, UnsupportedModelError
from service.bounds.operators import OPERATORS
from service.bounds.operators.base import Crossing
from service.bounds.rank_group import RankGroup
from service.parallel.collectives import resolve

COPY = "trivet.copy_to_group.default"


class Placement(Enum):
    """``OWN``: each rank has values of its own, and coefficients of its own part of a bound only.

    The values are shards, summands of a value that a collective will sum, or all shards joined for work that differs
    by rank.
    """

    REPLICATED = "replicated"
    OWN = "own"


_BEFORE = {Crossing.ENTER: Placement.REPLICATED, Crossing.LEAVE: Placement.OWN, Crossing.WITHIN: Placement.OWN}
_AFTER = {Crossing.ENTER: Placement.OWN, Crossing.LEAVE: Placement.REPLICATED, Crossing.WITHIN: Placement.OWN}


def place(graph: Graph) -> Mapping[str, Placement]:
    """Return the placement of every node of a whole model, which is replicated at both ends.

    Raises :class:`UnsupportedModelError`, see :func:`place_part`.
    """
    placements = place_part(graph, Placement.REPLICATED)
    if placements[graph.output.name] is Placement.OWN:
        raise UnsupportedModelError(
            "the model's output is divided over the tensor-parallel ranks; it must be replicated"
        )
    return placements


def place_part(graph: Graph, entering: Placement) -> Mapping[str, Placement]:
    """Return the placement of every node from that of the input; only collectives change it, and no operator mixes the
    two.

    Raises :class:`UnsupportedModelError` for a graph that is not divided in this way, since its bounds would
    count a replicated value once per rank.
    """
    placements = {graph.input.name: entering}
    for node in graph.nodes[1:]:
        placements[node.name] = _place(node, [placements[name] for name in node.inputs])
    return placements


def entering(graph: Graph) -> Placement:
    """Return the placement of a pipeline stage's input: the one that the stage's first collective needs."""
    crossings = (OPERATORS[node.operator].crossing for node in graph.nodes[1:])
    first = next((crossing for crossing in crossings if crossing is not None), Crossing.ENTER)
    return _BEFORE[first]


def _place(node: Node, inputs: list[Placement]) -> Placement:
    crossing = OPERATORS[node.operator].crossing
    before = inputs[0] if crossing is None else _BEFORE[crossing]
    if any(placement is not before for placement in inputs):
        found = ", ".join(f"{name} is {placement.value}" for name, placement in zip(node.inputs, inputs, strict=True))
        raise UnsupportedModelError(f"{node} needs {before.value} inputs on every tensor-parallel rank, but {found}")
    return before if crossing is None else _AFTER[crossing]


def entered(graph: Graph, tp_group: RankGroup) -> Graph:
    """Return the same graph with a ``copy_to_group`` wherever a replicated value is used for work that differs by
    rank.

    Our own layers have it already. Torch's functional collectives do not, since forward nothing happens there: a
    node's work differs if its constants differ, or one of its inputs. All ranks call it. Raises
    :class:`UnsupportedModelError` if ranks differ in their nodes, or in the members of a group.
    """
    if tp_group.axis.size == 1:
        return graph
    _check_groups(graph, tp_group)
    sure = _place_nodes(graph, frozenset())
    differing = _differing([node for node in graph.nodes[1:] if sure[node.name][0] is Placement.REPLICATED], tp_group)
    found = _place_nodes(graph, differing)
    if found[graph.output.name][1] is Placement.OWN and differing:
        raise UnsupportedModelError(_forgotten(next(node for node in graph.nodes if node.name in differing)))
    return Graph(tuple(_with_copies(graph, found, tp_group)))


Sides = tuple[Placement, Placement]
"""The placement of a node's inputs, and that of its value."""


def _place_nodes(graph: Graph, differing: Set[str]) -> Mapping[str, Sides]:
    """Return the placements of every node as if replicated values were copied wherever necessary."""
    found: dict[str, Sides] = {graph.input.name: (Placement.REPLICATED, Placement.REPLICATED)}
    for node in graph.nodes[1:]:
        crossing = OPERATORS[node.operator].crossing
        if crossing is None:
            own = node.name in differing or any(found[name][1] is Placement.OWN for name in node.inputs)
            found[node.name] = (Placement.OWN,) * 2 if own else (Placement.REPLICATED,) * 2
        else:
            found[node.name] = _BEFORE[crossing], _AFTER[crossing]
    return found


def _with_copies(graph: Graph, found: Mapping[str, Sides], tp_group: RankGroup) -> Iterator[Node]:
    copies: dict[str, str] = {}
    yield graph.input
    for node in graph.nodes[1:]:
        renamed = {}
        for name, shape in zip(node.inputs, node.input_shapes, strict=True):
            if found[node.name][0] is Placement.OWN and found[name][1] is Placement.REPLICATED:
                if name not in copies:
                    copies[name] = f"{name}_entered"
                    arguments = {"x": Ref(name), "group": tp_group.axis.group}
                    yield Node(copies[name], COPY, arguments, shape, (shape,), node.where)
                renamed[name] = copies[name]
        yield replace(node, arguments={name: _read(each, renamed) for name, each in node.arguments.items()})


def _read(value: Any, renamed: Mapping[str, str]) -> Any:
    if isinstance(value, Ref):
        return Ref(renamed.get(value.name, value.name))
    return tuple(_read(each, renamed) for each in value) if isinstance(value, tuple) else value


def _differing(nodes: Sequence[Node], tp_group: RankGroup) -> Set[str]:
    """Return the names of nodes with an argument that is not the same on every rank."""
    compared = [(node, each) for node in nodes for each in _plain(node)]
    device = next((each.device for _, each in compared if each.device.type != "cpu"), torch.device("cpu"))
    # Not by their names: a tracer also numbers the nodes that it drops later.
    steps = _number(" ".join(node.operator for node, _ in compared))
    if tp_group.largest(steps, device) != -tp_group.largest(-steps, device):
        raise UnsupportedModelError("the tensor-parallel ranks have different operators; expected the same on each")
    equal = tp_group.same_everywhere([each.to(device) for _, each in compared])
    return {node.name for (node, _), same in zip(compared, equal, strict=True) if not same}


def _plain(node: Node) -> list[Tensor]:
    """Return the arguments that do not depend on the input: tensors, and a number for the rest. Devices and
    groups are left out: they differ by rank.
    """
    rest: list[Any] = [node.operator, node.shape]
    tensors: list[Tensor] = []
    for name, value in node.arguments.items():
        for each in value if isinstance(value, tuple) else (value,):
            once = each.value if isinstance(each, Repeated) else each
            if isinstance(once, Tensor):
                tensors.append(once)
            elif name != "group" and not isinstance(once, torch.device | Ref):
                rest.append((name, once))
    return [torch.tensor([_number(str(rest))], dtype=torch.float64), *tensors]


def _number(text: str) -> int:
    """Return a number that stands for a text and is exact in float64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def _check_groups(graph: Graph, tp_group: RankGroup) -> None:
    own = tp_group.axis.group
    for node in graph.nodes[1:]:
        group = node.arguments.get("group")
        if isinstance(group, str) and group != own and _members(group) != _members(own):
            raise UnsupportedModelError(
                f"{node} is over ranks {_members(group)}; expected those of the tensor-parallel group, {_members(own)}"
            )


def _members(group: str) -> list[int]:
    """Return the global ranks of a group, in its order."""
    return list(dist.get_process_group_ranks(resolve(group)))


def _forgotten(node: Node) -> str:
    return (
        f"{node} uses a constant that differs between tensor-parallel ranks, outside of any "
        "copy_to_group … reduce_from_group region: the model forgot a collective"
    )


def check_constants(graph: Graph, placements: Mapping[str, Placement], tp_group: RankGroup) -> None:
    """Refuse constants that differ between ranks if by the graph all ranks do the same; all ranks call it."""
    used = [
        (node, value)
        for node in graph.nodes
        if placements[node.name] is Placement.REPLICATED
        for value in node.arguments.values()
        if isinstance(value, Tensor)
    ]
    equal = tp_group.same_everywhere([value for _, value in used])
    for (node, _), same in zip(used, equal, strict=True):
        if not same:
            raise UnsupportedModelError(_forgotten(node))
