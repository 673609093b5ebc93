"""Decides which layers of a network become column- and row-parallel (Megatron-LM, Shoeybi et al., 2019).

A region begins with layers whose output is divided, continues through operators that work on each rank's share,
and ends with layers that sum over the divided dimension. Everything outside regions stays replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from service.bounds.graph import Graph, Node
from service.bounds.operators import OPERATORS
from service.bounds.operators.sharding import Cut, Layer, Whole


@dataclass(frozen=True)
class Region:
    """``columns`` and ``rows`` name its first and last layers; ``cuts`` has every divided value."""

    columns: frozenset[str]
    rows: frozenset[str]
    cuts: Mapping[str, Cut]


@dataclass(frozen=True)
class _Stopped:
    """No region. ``at`` is the operator, if any, whose output the ranks would have to gather."""

    at: Node | None = None


@dataclass(frozen=True)
class _Missing:
    """The name of a value that would have to be divided too."""

    value: str


def regions(graph: Graph, ranks: int) -> list[Region]:
    """Return regions in execution order, found greedily from the input; no node belongs to two."""
    found: list[Region] = []
    taken: set[str] = set()
    for node in graph.nodes[1:]:
        if node.name in taken or layer_of(node) is None:
            continue
        region = _grown(graph, node, taken, ranks)
        if isinstance(region, Region):
            found.append(region)
            taken |= {*region.cuts, *region.rows}
    return found


def undivided(graph: Graph, found: Sequence[Region], ranks: int) -> Iterator[tuple[Node, Node]]:
    """Return layers in no region because an operator behind them cannot be divided, each with that operator."""
    taken = {name for region in found for name in (*region.cuts, *region.rows)}
    for node in graph.nodes[1:]:
        if node.name not in taken and layer_of(node) is not None:
            stopped = _grown(graph, node, taken, ranks)
            if isinstance(stopped, _Stopped) and stopped.at is not None:
                yield node, stopped.at


def layer_of(node: Node) -> Layer | None:
    """Return the node as a layer whose outputs and inner dimension can be divided; ``None`` for any other node."""
    return OPERATORS[node.operator].layer(node) if node.inputs else None


def _grown(graph: Graph, first: Node, taken: set[str], ranks: int) -> Region | _Stopped:
    """Return the region that begins with ``first``, with more layers beside it if values of two layers meet."""
    columns = {first.name}
    while True:
        found = _attempt(graph, columns, taken, ranks)
        if not isinstance(found, _Missing):
            return found
        beside = _layer_before(graph.by_name, found.value)
        if beside is None or beside in taken or beside in columns:
            return _Stopped(next(node for node in graph.nodes if found.value in node.inputs))
        columns.add(beside)


def _attempt(graph: Graph, columns: set[str], taken: set[str], ranks: int) -> Region | _Missing | _Stopped:
    """Return the region of these columns, if there is one."""
    cuts: dict[str, Cut] = {}
    rows: set[str] = set()
    for node in graph.nodes[1:]:
        divided = [name for name in node.inputs if name in cuts]
        layer = layer_of(node) if divided or node.name in columns else None
        if node.name in columns:
            assert layer is not None
            if divided or node.shape[layer.output_dim] < ranks:
                return _Stopped()
            cuts[node.name] = Cut.of(node, layer.output_dim, ranks)
        elif layer is not None and cuts[divided[0]].dim == layer.input_dim:
            rows.add(node.name)
        elif divided:
            absent = next((name for name in node.inputs if name not in cuts), None)
            if absent is not None:
                return _Missing(absent)
            if node.name in taken:
                return _Stopped()
            cut = OPERATORS[node.operator].shard(node, cuts, ranks)
            if isinstance(cut, Whole):
                return _Stopped(node)
            cuts[node.name] = cut
    if not rows or rows & taken or graph.output.name in cuts:
        return _Stopped()
    return Region(frozenset(columns), frozenset(rows), cuts)


def _layer_before(nodes: Mapping[str, Node], name: str) -> str | None:
    """Return the layer that a value comes from through operators of one input and as many entries."""
    node = nodes[name]
    while node.inputs and layer_of(node) is None:
        if len(node.inputs) != 1 or prod(node.shape) != prod(node.input_shapes[0]):
            return None
        node = nodes[node.inputs[0]]
    return node.name if node.inputs else None
