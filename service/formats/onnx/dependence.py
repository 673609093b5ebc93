"""Finds the values and shapes in an ONNX graph that depend on the values of its input, also through graphs in nodes.

All others are evaluated once and taken as constants, so no possible dependence may be missed here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import onnx

from service.formats.onnx.rounds import SEQUENCES, body_of, is_counted

SHAPE_ONLY = frozenset({"SequenceLength", "Shape", "Size"})
"""Operators whose result depends on their input's shape only."""
DRAWING = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators whose result is another one at each run."""
_SHAPED_BY_VALUES = frozenset(
    [
        "Expand", "OneHot", "Pad", "Reshape", "Resize", "SequenceAt", "SequenceErase", "Slice", "Split",
        "SplitToSequence", "Squeeze", "Tile", "TopK", "Unsqueeze", "Upsample",
    ]
)  # fmt: skip
"""Operators whose inputs after the first determine the shape of the result, beside reductions."""
_COMPARISONS = frozenset(
    ["And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"]
)
_SHAPED_BY_SHAPES = _COMPARISONS | SEQUENCES | {"ArgMax", "ArgMin", "ScatterElements", "ScatterND", "Sign"}
"""More operators, beside those that can be bounded, whose result's shape depends on shapes only."""

Numbered = tuple[int, onnx.NodeProto]


@dataclass(frozen=True)
class Dependence:
    """``nodes`` depend on the input's values; they come with their numbers, in an order of execution. ``values`` names
    their results and the input, ``varying`` those whose shape may depend on the input's values, too.
    """

    nodes: Sequence[Numbered]
    values: frozenset[str]
    varying: frozenset[str]

    def needed(self, outputs: Collection[str]) -> list[Numbered]:
        """Return the nodes that these outputs need."""
        wanted, needed = set(outputs), list[Numbered]()
        for index, node in reversed(self.nodes):
            if wanted.intersection(node.output):
                wanted.update(read_by(node))
                needed.append((index, node))
        return needed[::-1]


def dependence(graph: onnx.GraphProto, given: str, known: Collection[str]) -> Dependence:
    """Find the dependence on the value ``given``. ``known`` are operators whose result's shape follows from
    shapes, and for those that reshape from the inputs after the first; with any other operator it may depend on
    values.
    """
    values, varying = {given}, set[str]()
    nodes = _followed(graph, values, varying, known)
    return Dependence(nodes, frozenset(values), frozenset(varying))


def _followed(graph: onnx.GraphProto, values: set[str], varying: set[str], known: Collection[str]) -> list[Numbered]:
    """Add to the values that depend on the input and to those whose shape may, and return the nodes that give them."""
    found = list[Numbered]()
    for index, node in ordered(graph.node):
        read = read_by(node)
        if _varies(node, read, values, varying, known):
            varying.update(filter(None, node.output))
        if read & (varying if node.op_type in SHAPE_ONLY else values | varying):
            values.update(filter(None, node.output))
            found.append((index, node))
    return found


def _varies(
    node: onnx.NodeProto, read: Collection[str], values: set[str], varying: set[str], known: Collection[str]
) -> bool:
    """Return whether the shapes of a node's outputs may depend on the input's values."""
    kind = node.op_type
    if kind in SHAPE_ONLY:
        return False
    if varying.intersection(read):
        return True
    if kind == "If" or is_counted(node, values, varying):
        return (kind == "If" and node.input[0] in values) or _varies_within(node, values, known)
    name = kind if node.domain in ("", "ai.onnx") else f"{node.domain}.{kind}"
    if kind == "Compress" or name not in _SHAPED_BY_SHAPES.union(known):
        return bool(values.intersection(read))
    by_values = kind in _SHAPED_BY_VALUES or kind.startswith("Reduce")
    return by_values and bool(values.intersection(node.input[1:]))


def _varies_within(node: onnx.NodeProto, values: set[str], known: Collection[str]) -> bool:
    """Return whether a shape within the graphs of a node may depend on the input's values."""
    within = values | {each.name for each in _varying_inputs(node)}
    found = set[str]()
    for graph in graphs_in(node):
        _followed(graph, set(within), found, known)
    return bool(found)


def _varying_inputs(node: onnx.NodeProto) -> Sequence[onnx.ValueInfoProto]:
    """Return the inputs of a body that may depend on the input: all but the round and the condition. A branch
    has none.
    """
    if node.op_type == "If":
        return ()
    return list(body_of(node).input)[2 if node.op_type == "Loop" else 0 :]


def ordered(nodes: Sequence[onnx.NodeProto]) -> list[Numbered]:
    """Return the nodes so that each comes after those whose results it reads; files may have them in any order."""
    giver = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    before = [{giver[name] for name in read_by(node) if name in giver} for node in nodes]
    after = defaultdict[int, list[int]](list)
    for index, indices in enumerate(before):
        for each in indices:
            after[each].append(index)
    ready, found = [index for index, indices in enumerate(before) if not indices], list[int]()
    while ready:
        index = heappop(ready)
        found.append(index)
        for each in after[index]:
            before[each].discard(index)
            if not before[each]:
                heappush(ready, each)
    in_circles = sorted(set(range(len(nodes))).difference(found))  # onnxruntime refuses them
    return [(index, nodes[index]) for index in (*found, *in_circles)]


def read_by(node: onnx.NodeProto) -> set[str]:
    """Return the names of the values that a node reads, also those of the outer graph that graphs in its attributes
    read.
    """
    names = {name for name in node.input if name}
    for graph in graphs_in(node):
        names |= _captured(graph)
    return names


def graphs_in(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs in a node's attributes: its branches, or the body of a loop."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def names_in(graph: onnx.GraphProto) -> set[str]:
    """Return the names of a graph's own values."""
    own = {each.name for each in (*graph.input, *graph.initializer)}
    own |= {each.values.name for each in graph.sparse_initializer}
    return own | {name for node in graph.node for name in node.output if name}


def _captured(graph: onnx.GraphProto) -> set[str]:
    read = {name for node in graph.node for name in read_by(node)} | {each.name for each in graph.output}
    return read - names_in(graph)
