"""Finds the values and shapes in an ONNX graph that depend on the values of its input, also through graphs in nodes,
and what of it can be bounded.

All others are evaluated once and taken as constants, so no possible dependence may be missed here. A branch that a
constant chooses is put in the place of its ``If``; loops with a constant number of rounds, and sequences of tensors,
are written out. Exporters write a ``Loop`` for a loop of a scripted module, a ``Scan`` for a recurrent layer, and
sequences for lists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from service.formats.onnx.inputs import graph_input
from service.formats.onnx.operators import OPERATORS

SEQUENCES = frozenset(
    [
        "ConcatFromSequence",
        "SequenceAt",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "SequenceLength",
        "SplitToSequence",
    ]
)
"""Operators of sequences, which need no rules: the contents are known beforehand."""
SHAPE_ONLY = frozenset({"SequenceLength", "Shape", "Size"})
"""Operators whose result depends on their input's shape only."""
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
_SHAPED_BY_SHAPES = OPERATORS | _COMPARISONS | SEQUENCES | {"ArgMax", "ArgMin", "ScatterElements", "ScatterND", "Sign"}
"""Operators that can be bounded, and others whose result's shape depends on shapes only."""

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


def dependence_of(model: onnx.ModelProto) -> Dependence:
    """Find the dependence on the values of the model's input. The shapes of an operator's results follow from shapes,
    and for those that reshape from the inputs after the first; unless it can be bounded they may depend on values.
    """
    given = graph_input(model).name
    values, varying = {given}, set[str]()
    nodes = _follow(model.graph, values, varying)
    return Dependence(nodes, frozenset(values), frozenset(varying))


def supported(model: onnx.ModelProto, found: Dependence) -> set[int]:
    """Return the numbers of the nodes that can be bounded, or that a branch replaces."""
    written = OPERATORS | SEQUENCES
    known = {
        index
        for index, node in enumerate(model.graph.node)
        if operator_of(node) in written and not _is_of_whole_numbers(node)
    }
    return known | constant_conditions(model, found).keys() | counted_loops(model, found).keys()


def operator_of(node: onnx.NodeProto) -> str:
    """Return a node's operator, with its domain if that is not ONNX's own."""
    kind: str = node.op_type
    return kind if node.domain in ("", "ai.onnx") else f"{node.domain}.{kind}"


def _is_of_whole_numbers(node: onnx.NodeProto) -> bool:
    return node.op_type == "Mod" and not any(each.name == "fmod" and each.i for each in node.attribute)


def constant_conditions(model: onnx.ModelProto, found: Dependence) -> dict[int, onnx.NodeProto]:
    """Return every ``If``, by its number, whose condition does not depend on the input's values."""
    return {
        index: node
        for index, node in enumerate(model.graph.node)
        if operator_of(node) == "If" and node.input[0] not in found.values
    }


def counted_loops(model: onnx.ModelProto, found: Dependence) -> dict[int, onnx.NodeProto]:
    """Return every ``Loop`` and ``Scan``, by its number, whose number of rounds is a constant."""
    return {
        index: node for index, node in enumerate(model.graph.node) if _is_counted(node, found.values, found.varying)
    }


def working_nodes(model: onnx.ModelProto) -> list[Numbered]:
    """Return the nodes, with their numbers, that depend on the input's values and that an output needs, in an order
    of execution.
    """
    return dependence_of(model).needed([output.name for output in model.graph.output])


def _follow(graph: onnx.GraphProto, values: set[str], varying: set[str]) -> list[Numbered]:
    """Add to the values that depend on the input and to those whose shape may, and return the nodes that give them."""
    found = list[Numbered]()
    for index, node in ordered(graph.node):
        read = read_by(node)
        if _varies(node, read, values, varying):
            varying.update(filter(None, node.output))
        if read & (varying if node.op_type in SHAPE_ONLY else values | varying):
            values.update(filter(None, node.output))
            found.append((index, node))
    return found


def _varies(node: onnx.NodeProto, read: Collection[str], values: set[str], varying: set[str]) -> bool:
    """Return whether the shapes of a node's outputs may depend on the input's values."""
    kind = node.op_type
    if kind in SHAPE_ONLY:
        return False
    if varying.intersection(read):
        return True
    if kind == "If" or _is_counted(node, values, varying):
        return (kind == "If" and node.input[0] in values) or _varies_within(node, values)
    if kind == "Compress" or operator_of(node) not in _SHAPED_BY_SHAPES:
        return bool(values.intersection(read))
    by_values = kind in _SHAPED_BY_VALUES or kind.startswith("Reduce")
    return by_values and bool(values.intersection(node.input[1:]))


def _varies_within(node: onnx.NodeProto, values: set[str]) -> bool:
    """Return whether a shape within the graphs of a node may depend on the input's values."""
    within = values | {each.name for each in _varying_inputs(node)}
    found = set[str]()
    for graph in graphs_in(node):
        _follow(graph, set(within), found)
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
    """Return the names of the values that a node reads, also from the outer graph within its attributes' graphs."""
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


def _is_counted(node: onnx.NodeProto, values: Collection[str], varying: Collection[str]) -> bool:
    """Return whether a ``Loop`` or ``Scan`` has the same number of rounds for all inputs; ``values`` depend on
    the input, and so do the shapes of the ``varying`` ones.
    """
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "Scan":
        return not set(node.input) & set(varying)
    if node.op_type != "Loop" or not node.input or not node.input[0]:
        return False
    asks = goes_on(body_of(node))
    return asks is not None and not {*node.input[:2], asks} & set(values)


def body_of(node: onnx.NodeProto) -> onnx.GraphProto:
    found: onnx.GraphProto = next(each.g for each in node.attribute if each.name == "body")
    return found


def goes_on(body: onnx.GraphProto) -> bool | str | None:
    """Return whether a loop's body asks for another round, which it may also take from its own condition, or
    the name of the outer value that says so, as in a scripted module; ``None`` if the body computes it.
    """
    given_by = {name: node for node in body.node for name in node.output}
    name = body.output[0].name
    while name in given_by and given_by[name].op_type in ("Cast", "Identity"):
        name = given_by[name].input[0]
    if len(body.input) > 1 and name == body.input[1].name:
        return True
    constants: dict[str, Any] = {tensor.name: tensor for tensor in body.initializer}
    if name in given_by and given_by[name].op_type == "Constant":
        # By a tensor or, as newer exporters write it, by a number.
        constants.update((name, helper.get_attribute_value(each)) for each in given_by[name].attribute)
    if name in constants:
        found = constants[name]
        return bool(np.all(numpy_helper.to_array(found) if isinstance(found, onnx.TensorProto) else found))
    return None if name in given_by or name in {each.name for each in body.input} else name
