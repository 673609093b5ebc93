"""The cuts of a graph into pipeline stages, and the graph of one of them.

A cut lies between two nodes in execution order. The values that later nodes read from earlier ones cross it,
together as one row of numbers. Stages should hold equally much, and little should cross.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf, prod
from typing import Any

from torch import Tensor

from service.bounds.graph import INPUT, BatchSize, Graph, Node, Ref, Repeated, UnsupportedModelError
from service.bounds.placement import Placement

SLACK = 1.1
"""A stage may hold this much more than the largest one of the best cuts, if less crosses then."""
VIEW, CONCATENATE, SLICE = "aten.view.default", "aten.cat.default", "aten.slice.Tensor"


@dataclass(frozen=True)
class _StageCut:
    """A cut before the node number ``at``; ``crossing`` are names of values, in execution order."""

    at: int
    crossing: tuple[str, ...]
    size: int


def cut_graph(graph: Graph, placements: Mapping[str, Placement], stages: int) -> list[Graph]:
    """Return the stages' graphs: the output of each is the next one's input, with a node of :data:`INPUT` of its own.

    Raises :class:`UnsupportedModelError` if there are too few places for a cut.
    """
    cuts = _choose_cuts(graph, _possible(graph, placements), stages)
    ends = [_StageCut(1, (graph.input.name,), 0), *cuts, _StageCut(len(graph.nodes), (graph.output.name,), 0)]
    return [_part(graph, first, last) for first, last in pairwise(ends)]


def held(node: Node) -> int:
    """Return how many numbers a stage has to keep for a node: constants, and a value with its bounds."""
    return node.size + sum(_numbers(value) for value in node.arguments.values())


def _numbers(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(map(_numbers, value))
    if isinstance(value, Repeated):
        return value.value.numel()
    return value.numel() if isinstance(value, Tensor) else 0


def _possible(graph: Graph, placements: Mapping[str, Placement]) -> list[_StageCut]:
    """A value that is divided over tensor-parallel ranks and one that is not do not cross together."""
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    last = {name: position[node.name] for node in graph.nodes for name in node.inputs}
    found = []
    for at in range(2, len(graph.nodes)):
        crossing = tuple(node.name for node in graph.nodes[:at] if last.get(node.name, -1) >= at)
        if len({placements[name] for name in crossing}) == 1:
            size = sum(graph.nodes[position[name]].size for name in crossing)
            found.append(_StageCut(at, crossing, size))
    return found


def _choose_cuts(graph: Graph, possible: Sequence[_StageCut], stages: int) -> list[_StageCut]:
    """Return the cuts that the fewest entries cross, among those in which no stage holds much more than it must."""
    if len(possible) < stages - 1:
        raise UnsupportedModelError(
            f"parallel.pp: {stages} stages, but the model's graph has {len(possible)} places for a cut; expected at "
            f"most {len(possible) + 1}"
        )
    totals = [0, *accumulate(held(node) for node in graph.nodes)]
    most, _ = _best(possible, totals, stages, lambda so_far, share, cut: max(so_far, share))
    _, cuts = _best(
        possible, totals, stages, lambda so_far, share, cut: so_far + cut.size if share <= SLACK * most else inf
    )
    return cuts


Cost = Callable[[float, float, _StageCut], float]
"""The cost of the stages up to a cut, from the cost of those before the last one, the size of the last one, and the
cut.
"""


def _best(
    possible: Sequence[_StageCut], totals: Sequence[int], stages: int, cost: Cost
) -> tuple[float, list[_StageCut]]:
    """Return the least cost and its cuts: for every end the best of one stage, then of two, and so on."""
    ends = [*possible, _StageCut(len(totals) - 1, (), 0)]
    best = [cost(0.0, totals[end.at], end) for end in ends]
    before: list[list[int]] = []
    for _ in range(stages - 1):
        onward, chosen = [inf], [0]
        for index, end in enumerate(ends[1:], start=1):
            costs = [cost(best[each], totals[end.at] - totals[ends[each].at], end) for each in range(index)]
            onward.append(min(costs))
            chosen.append(costs.index(onward[-1]))
        best = onward
        before.append(chosen)
    found, index = [], len(ends) - 1
    for chosen in reversed(before):
        index = chosen[index]
        found.append(ends[index])
    return best[-1], found[::-1]


def _part(graph: Graph, first: _StageCut, last: _StageCut) -> Graph:
    nodes = graph.by_name
    entering = [nodes[name] for name in first.crossing]
    begin = _separated(entering) if len(entering) > 1 else [_input(entering[0].name, entering[0].shape)]
    end = _join_values([nodes[name] for name in last.crossing]) if len(last.crossing) > 1 else []
    return Graph((*begin, *graph.nodes[first.at : last.at], *end))


def _input(name: str, shape: tuple[int, ...]) -> Node:
    return Node(name, INPUT, {}, shape)


def _separated(entering: Sequence[Node]) -> list[Node]:
    """Return one row of numbers, and each value's share of it, in the value's own shape, by its name."""
    total = sum(node.size for node in entering)
    found, start = [_input("entering", (total,))], 0
    for node in entering:
        own = {"self": Ref("entering"), "dim": 1, "start": start, "end": start + node.size, "step": 1}
        piece = Node(f"{node.name}_entering", SLICE, own, (node.size,), ((total,),), node.where)
        found += [piece, _viewed(node.name, piece, node.shape)]
        start += node.size
    return found


def _join_values(leaving: Sequence[Node]) -> list[Node]:
    flat = [_viewed(f"{node.name}_leaving", node, (node.size,)) for node in leaving]
    arguments = {"tensors": tuple(Ref(node.name) for node in flat), "dim": 1}
    shapes = tuple(node.shape for node in flat)
    return [*flat, Node("leaving", CONCATENATE, arguments, (sum(map(prod, shapes)),), shapes)]


def _viewed(name: str, of: Node, shape: tuple[int, ...]) -> Node:
    return Node(name, VIEW, {"self": Ref(of.name), "size": (BatchSize(), *shape)}, shape, (of.shape,), of.where)
