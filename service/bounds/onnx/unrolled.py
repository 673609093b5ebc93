"""Branches that a constant chooses, loops with a constant number of rounds, and sequences, written out as the nodes
that they come to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from service.bounds.graph import UnsupportedModelError
from service.bounds.operators.conversion import Array
from service.formats.onnx import (
    SEQUENCES,
    Dependence,
    body_of,
    constant_conditions,
    counted_loops,
    dependence_of,
    goes_on,
    graphs_in,
    name_of,
    names_in,
    opset_of,
    ordered,
    read_by,
)

MOST_NODES = 2**14
"""Nodes that loops are written out as."""
Evaluate = Callable[[onnx.ModelProto, set[str]], Mapping[str, Array]]


def written_out(model: onnx.ModelProto, evaluate: Evaluate) -> onnx.ModelProto:
    """Return the model with the branch in the place of each ``If`` whose condition is a constant, with loops written
    out and without sequences; ``evaluate`` gives values of constants, and values of others for their shapes.
    """
    while True:
        model = _with_loops_unrolled(_with_branches_taken(model, evaluate), evaluate)
        if not constant_conditions(model, dependence_of(model)):  # a round may bring branches
            return _without_sequences(model, evaluate)


def _with_branches_taken(model: onnx.ModelProto, evaluate: Evaluate) -> onnx.ModelProto:
    """Return the model without any ``If`` that does not ask the input; ``evaluate`` gives values of constants.

    Exporters write them where a shape decides, as for ``squeeze``.
    """
    while chosen := constant_conditions(model, dependence_of(model)):
        values = evaluate(model, {node.input[0] for node in chosen.values()})
        taken = _without_nodes(model)
        for index, node in enumerate(model.graph.node):
            if index in chosen:
                _put_branch(taken.graph, node, index, bool(values[node.input[0]].all()))
            else:
                taken.graph.node.append(node)
        model = taken
    return model


def _without_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    found = onnx.ModelProto()
    found.CopyFrom(model)
    found.graph.ClearField("node")
    return found


def _put_branch(graph: onnx.GraphProto, node: onnx.NodeProto, index: int, condition: bool) -> None:
    """Add the branch that is taken, its values under names that nothing else has."""
    wanted = "then_branch" if condition else "else_branch"
    branch = next(each.g for each in node.attribute if each.name == wanted)
    place = f"{name_of(node, index)}.{index}.{wanted}"
    names = {name: f"{place}.{name}" for name in names_in(branch)}
    for tensor in branch.initializer:
        graph.initializer.add().CopyFrom(tensor)
        graph.initializer[-1].name = names[tensor.name]
    for sparse in branch.sparse_initializer:
        graph.sparse_initializer.add().CopyFrom(sparse)
        graph.sparse_initializer[-1].values.name = names[sparse.values.name]
    for inner in branch.node:
        graph.node.add().CopyFrom(inner)
        renamed(graph.node[-1], names)
    for given, output in zip(branch.output, node.output, strict=True):
        if output:
            graph.node.append(helper.make_node("Identity", [names.get(given.name, given.name)], [output]))


def _with_loops_unrolled(model: onnx.ModelProto, evaluate: Evaluate) -> onnx.ModelProto:
    """Return the model with the rounds of each loop one after the other; ``evaluate`` gives values of constants, and
    values of others for their shapes.
    """
    while counted := counted_loops(model, dependence_of(model)):
        wanted = {name for node in counted.values() for name in _deciding_values(node)}
        values = evaluate(model, wanted) if wanted else {}
        read = {name for node in model.graph.node for name in read_by(node)} | {
            each.name for each in model.graph.output
        }
        found = _without_nodes(model)
        for index, node in enumerate(model.graph.node):
            if index in counted:
                _Unrolling(found.graph, opset_of(model), node, f"{name_of(node, index)}.{index}", read).put(values)
            else:
                found.graph.node.append(node)
        model = found
    return model


def _deciding_values(node: onnx.NodeProto) -> list[str]:
    """Return the values that decide about the number of rounds."""
    if node.op_type == "Loop":
        asks = goes_on(body_of(node))
        return [*filter(None, node.input[:2]), *([asks] if isinstance(asks, str) else [])]
    return list(node.input[-int(_attributes(node)["num_scan_inputs"]) :])


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


@dataclass(eq=False)
class _NodeWriter(ABC):
    """Adds nodes and constants to a graph."""

    graph: onnx.GraphProto
    opset: int

    def _add(self, operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.graph.node.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def _unsqueeze(self, name: str, axis: int, output: str) -> str:
        """Add a dimension of length 1. Which one is an attribute, and from opset 13 on an input."""
        if self.opset < 13:
            return self._add("Unsqueeze", [name], output, axes=[axis])
        return self._add("Unsqueeze", [name, self._constant(f"{output}.axis", np.array([axis]))], output)

    @abstractmethod
    def _constant(self, name: str, array: Array) -> str:
        """Add a constant, and return the name by which nodes read it."""


@dataclass(eq=False)
class _Unrolling(_NodeWriter):
    """One loop on its way into a graph; ``place`` begins the names of all that is added, ``read`` are names that are
    read anywhere.
    """

    node: onnx.NodeProto
    place: str
    read: Collection[str]
    body: onnx.GraphProto = field(init=False)
    shared: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.body = body_of(self.node)
        self.shared = {tensor.name: f"{self.place}.{tensor.name}" for tensor in self.body.initializer}
        for tensor in self.body.initializer:
            self.graph.initializer.add().CopyFrom(tensor)
            self.graph.initializer[-1].name = self.shared[tensor.name]

    def put(self, values: Mapping[str, Array]) -> None:
        if self.body.sparse_initializer:
            raise self._refuse("its body has sparse constants")
        (self._put_loop if self.node.op_type == "Loop" else self._put_scan)(values)

    def _put_loop(self, values: Mapping[str, Array]) -> None:
        count, condition, *carried = self.node.input
        begins = not condition or bool(values[condition].all())
        rounds = int(values[count].reshape(-1)[0]) if begins else 0
        asks = goes_on(self.body)
        goes = bool(values[asks].all()) if isinstance(asks, str) else asks
        rounds = self._check_rounds(rounds if goes else min(rounds, 1))
        asked = self._constant("condition", np.array(True))
        rows = list[list[str]]()
        for index in range(rounds):
            given = [self._constant(f"{index}.round", np.array(index)), asked, *carried]
            _, *found = self._round(index, given)
            carried, row = found[: len(carried)], found[len(carried) :]
            rows.append(row)
        self._finish(carried, rows, [0] * (len(self.node.output) - len(carried)))

    def _put_scan(self, values: Mapping[str, Array]) -> None:
        attributes = _attributes(self.node)
        count = int(attributes["num_scan_inputs"])
        if self.opset < 9:
            raise self._refuse("before opset 9 it is not supported")
        state, scanned = list(self.node.input[:-count]), self.node.input[-count:]
        axes = list(attributes.get("scan_input_axes", [0] * count))
        lengths = {values[name].shape[axis] for name, axis in zip(scanned, axes, strict=True)}
        rounds, backward = self._check_rounds(min(lengths)), attributes.get("scan_input_directions", [0] * count)
        rows = list[list[str]]()
        for index in range(rounds):
            rows_in = [
                self._gathered(place, name, axis, rounds - 1 - index if back else index)
                for place, (name, axis, back) in enumerate(zip(scanned, axes, backward, strict=True))
            ]
            found = self._round(index, [*state, *rows_in])
            state, row = found[: len(state)], found[len(state) :]
            rows.append(row)
        outputs = len(self.body.output) - len(state)
        turned = attributes.get("scan_output_directions", [0] * outputs)
        self._finish(state, rows, list(attributes.get("scan_output_axes", [0] * outputs)), turned)

    def _check_rounds(self, rounds: int) -> int:
        size = max(rounds, 0) * len(self.body.node)
        if size > MOST_NODES:
            raise self._refuse(f"its rounds come to {size} nodes, {MOST_NODES} at most")
        return max(rounds, 0)

    def _round(self, index: int, given: Sequence[str]) -> list[str]:
        """Add a copy of the body's nodes, and return the names of its outputs."""
        own = {name: f"{self.place}.{index}.{name}" for name in names_in(self.body)} | self.shared
        names = own | dict(zip((each.name for each in self.body.input), given, strict=True))
        for inner in self.body.node:
            self.graph.node.add().CopyFrom(inner)
            renamed(self.graph.node[-1], names)
        return [names.get(each.name, each.name) for each in self.body.output]

    def _finish(
        self, carried: Sequence[str], rows: list[list[str]], axes: Sequence[int], turned: Sequence[int] = ()
    ) -> None:
        """Give the outputs their names: what was carried, and the rows of each round side by side."""
        names = self.node.output
        for name, output in zip(carried, names, strict=False):
            if output:
                self._add("Identity", [name], output)
        for place, (output, axis) in enumerate(zip(names[len(carried) :], axes, strict=False)):
            if output not in self.read:
                continue
            if not rows:
                raise self._refuse(f"{output!r} has no rows, as there is no round")
            parts = [
                self._unsqueeze(row[place], axis, f"{self.place}.{output}.{index}") for index, row in enumerate(rows)
            ]
            self._add("Concat", parts[::-1] if turned and turned[place] else parts, output, axis=axis)

    def _gathered(self, input_: int, name: str, axis: int, index: int) -> str:
        place = self._constant(f"place {index}", np.array(index))
        return self._add("Gather", [name, place], f"{self.place}.{index}.{input_}.row", axis=axis)

    def _constant(self, name: str, array: Array) -> str:
        full = f"{self.place}.{name}"
        if full not in self.shared.values():
            self.graph.initializer.append(numpy_helper.from_array(array, full))
            self.shared[f" {name}"] = full
        return full

    def _refuse(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"ONNX {self.node.op_type} (node {self.node.name!r}): {reason}")


def renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Rename values of a node and of the graphs in it."""
    for values in (node.input, node.output):
        for position, name in enumerate(values):
            values[position] = names.get(name, name)
    for graph in graphs_in(node):
        own = names_in(graph)
        outer = {name: new for name, new in names.items() if name not in own}
        for inner in graph.node:
            renamed(inner, outer)
        for output in graph.output:
            output.name = outer.get(output.name, output.name)


def _without_sequences(model: onnx.ModelProto, evaluate: Evaluate) -> onnx.ModelProto:
    """Return the model with tensors in the place of the sequences that they are read from."""
    if not any(node.op_type in SEQUENCES for node in model.graph.node):
        return model
    depends = dependence_of(model)
    chosen = {
        name
        for node in model.graph.node
        if node.op_type in SEQUENCES
        for name in _places(node)
        if name and name not in depends.values
    }
    split = {node.input[0] for node in model.graph.node if node.op_type == "SplitToSequence"} - depends.varying
    found = _without_nodes(model)
    writer = _Sequences(found.graph, opset_of(model), evaluate(model, chosen | split), depends)
    for index, node in ordered(model.graph.node):
        writer.take(node, name_of(node, index))
    return found


def _places(node: onnx.NodeProto) -> Sequence[str]:
    """Return the inputs of a node that say where in a sequence, or into which lengths."""
    if node.op_type in ("SequenceAt", "SequenceErase", "SplitToSequence"):
        return list(node.input)[1:2]
    return list(node.input)[2:3] if node.op_type == "SequenceInsert" else ()


@dataclass(eq=False)
class _Sequences(_NodeWriter):
    """Sequences as the names of the tensors that they hold, while nodes are written into a graph."""

    values: Mapping[str, Array]
    depends: Dependence
    known: dict[str, list[str]] = field(default_factory=dict)

    def take(self, node: onnx.NodeProto, name: str) -> None:
        if node.op_type == "Identity" and node.input[0] in self.known:
            self.known[node.output[0]] = self.known[node.input[0]]
        elif node.op_type not in SEQUENCES:
            self.graph.node.append(node)
        else:
            unknown = [each for each in _places(node) if each in self.depends.values]
            unknown += [each for each in node.input if each in self.depends.varying]
            if unknown:
                raise UnsupportedModelError(f"ONNX {node.op_type} (node {name!r}): {unknown[0]!r} depends on the input")
            self._write_sequence(node, name)

    def _write_sequence(self, node: onnx.NodeProto, name: str) -> None:
        (output, *_), kind, attributes = node.output, node.op_type, _attributes(node)
        if kind == "SequenceEmpty":
            self.known[output] = []
        elif kind == "SequenceConstruct":
            self.known[output] = list(node.input)
        elif kind == "SplitToSequence":
            self.known[output] = self._split(node, name, attributes)
        elif node.input[0] not in self.known:
            raise UnsupportedModelError(f"ONNX {kind} (node {name!r}): {node.input[0]!r} is no sequence of this graph")
        else:
            self._of_known(node, list(self.known[node.input[0]]), attributes)

    def _of_known(self, node: onnx.NodeProto, held: list[str], attributes: Mapping[str, Any]) -> None:
        (output, *_), kind = node.output, node.op_type
        place = next((int(self.values[each].reshape(-1)[0]) for each in _places(node) if each), None)
        if kind == "SequenceAt":
            assert place is not None
            self._add("Identity", [held[place]], output)
        elif kind == "SequenceLength":
            self.graph.initializer.append(numpy_helper.from_array(np.array(len(held)), output))
        elif kind == "SequenceErase":
            held.pop(-1 if place is None else place)
            self.known[output] = held
        elif kind == "SequenceInsert":
            held.insert(len(held) if place is None else place if place >= 0 else place + len(held), node.input[1])
            self.known[output] = held
        else:
            self._concatenate(held, output, int(attributes["axis"]), bool(attributes.get("new_axis", 0)))

    def _concatenate(self, held: Sequence[str], output: str, axis: int, new: bool) -> None:
        parts = [self._unsqueeze(each, axis, f"{output}.{index}") for index, each in enumerate(held)] if new else held
        self._add("Concat", parts, output, axis=axis)

    def _split(self, node: onnx.NodeProto, name: str, attributes: Mapping[str, Any]) -> list[str]:
        axis, x = int(attributes.get("axis", 0)), node.input[0]
        length = self.values[x].shape[axis]
        if len(node.input) < 2 or not node.input[1]:
            if not attributes.get("keepdims", 1):
                places = [self._constant(f"{name}.place {index}", np.array(index)) for index in range(length)]
                return [
                    self._add("Gather", [x, place], f"{name}.{index}", axis=axis) for index, place in enumerate(places)
                ]
            lengths = [1] * length
        else:
            given = self.values[node.input[1]]
            size = int(given.reshape(-1)[0])
            lengths = [min(size, length - at) for at in range(0, length, size)] if given.ndim == 0 else given.tolist()
        parts = [f"{name}.{index}" for index in range(len(lengths))]
        if self.opset >= 13:
            inputs = [x, self._constant(f"{name}.lengths", np.array(lengths))]
            self.graph.node.append(helper.make_node("Split", inputs, parts, axis=axis))
        else:
            self.graph.node.append(helper.make_node("Split", [x], parts, axis=axis, split=lengths))
        return parts

    def _constant(self, name: str, array: Array) -> str:
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name
