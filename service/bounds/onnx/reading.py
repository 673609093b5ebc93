"""An ONNX file as plain data: the nodes that depend on the input's values, and the constants around them.

The model is read at a batch of one, where every shape is a number. What does not depend on the input's values
(weights, shape arithmetic) is a constant, and its value is what onnxruntime computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from service.bounds.graph import UnsupportedModelError
from service.bounds.onnx.unrolled import written_out
from service.bounds.onnx.whole_numbers import checked
from service.bounds.operators.conversion import Array, Call
from service.formats.onnx import (
    FLOATS,
    INNER,
    OPERATORS,
    OnnxError,
    batch_of_one,
    first_line,
    graph_input,
    name_of,
    operator_of,
    opset_of,
    precision_of,
    texts_in,
    working_nodes,
)
from service.formats.onnx import parse as parse_file

_LATER_OUTPUTS_ALONE = frozenset({"GRU", "LSTM", "RNN"})
"""Operators whose first output may be left out, as exporters do where only the last state is used."""
TESTS = frozenset({"IsInf", "IsNaN"})
"""Operators whose answer depends on how values are rounded and where they overflow."""
_NUMERIC = "biufV"
"""Kinds of numpy's types; V are the floating-point types that it does not have itself."""


@dataclass(frozen=True, eq=False)
class Description:
    """Describes a model. ``shapes`` has every value that a call reads or writes, for a batch of one; ``constants`` has
    values.
    """

    calls: Sequence[Call]
    constants: Mapping[str, Array]
    shapes: Mapping[str, tuple[int, ...]]
    input: str
    outputs: tuple[str, ...]

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the numbers of entries of the input, and of all outputs together."""
        return prod(self.shapes[self.input]), sum(prod(self.shapes[name]) for name in self.outputs)


class CannotRunError(UnsupportedModelError):
    """onnxruntime refuses the input, such as an index beyond a table."""


class Runtime:
    """The model in onnxruntime, one instance at a time."""

    def __init__(self, model: onnx.ModelProto, outputs: Sequence[str]) -> None:
        import onnxruntime  # noqa: PLC0415 - it starts a thread, which a process to be forked must not have

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            self.session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises types of its own, one for each status code
            raise UnsupportedModelError(f"onnxruntime cannot load the model: {first_line(error)}") from error
        given = graph_input(model)
        self.name, self.shape = given.name, batch_of_one(given)
        self.dtype: type[np.floating[Any]] = FLOATS[given.type.tensor_type.elem_type]
        self.precision = precision_of(model)
        self.outputs = list(outputs)

    def __call__(self, flat: Array) -> list[Array]:
        """Return the outputs for one flat instance."""
        try:
            found: list[Array] = self.session.run(
                self.outputs, {self.name: flat.reshape(self.shape).astype(self.dtype)}
            )
        except Exception as error:
            raise CannotRunError(f"onnxruntime cannot run the model: {first_line(error)}") from error
        for name, value in zip(self.outputs, found, strict=True):
            if not isinstance(value, np.ndarray) or value.dtype.kind not in _NUMERIC:
                raise UnsupportedModelError(f"{name!r} is no tensor of numbers")
        return found

    def flat(self, instance: Array) -> Array:
        """Return all outputs for one flat instance, side by side, in float64."""
        return np.concatenate([each.reshape(-1).astype(np.float64) for each in self(instance)])

    @classmethod
    def of(cls, model: onnx.ModelProto) -> Runtime:
        return cls(model, [output.name for output in model.graph.output])


def parse(data: bytes) -> onnx.ModelProto:
    """Return the model of a file's content. Raises :class:`UnsupportedModelError` if it is not one that can be read."""
    try:
        return parse_file(data)
    except OnnxError as error:
        raise UnsupportedModelError(str(error)) from error


def describe(model: onnx.ModelProto) -> Description:
    """Split the model, :func:`written_out`, into calls and constants."""
    model = written_out(model, values_of)
    given = graph_input(model)
    opset = opset_of(model)
    calls = _told_apart([call_of(node, index, opset) for index, node in working_nodes(model)])
    for call in calls:
        if any(isinstance(each, onnx.GraphProto) for each in call.attributes.values()):
            raise call.refuse(INNER)
        if call.operator in TESTS and precision_of(model):
            raise call.refuse(f"where {precision_of(model)} overflows is not bounded; expected the model in float32")
        if not call.outputs[0] and call.operator not in _LATER_OUTPUTS_ALONE:
            raise call.refuse("its first output has no name")
    names = {name for call in calls for name in (*call.inputs, *call.outputs) if name}
    values = values_of(model, names - texts_in(model))
    calls, depends = _with_entries(calls, values, given.name)
    outputs = tuple(output.name for output in model.graph.output)
    for name in outputs:
        if name not in depends:
            raise UnsupportedModelError(f"output {name!r} does not depend on the input")
    constants = {name: value for name, value in values.items() if name not in depends}
    for name, value in constants.items():
        if value.dtype.kind == "f" and bool(np.isnan(value).any()):
            raise UnsupportedModelError(f"constant {name!r} holds what is not a number (NaN)")
    shapes = {name: tuple(value.shape) for name, value in values.items()} | {given.name: batch_of_one(given)}
    return Description(checked(calls, values, depends), constants, shapes, given.name, outputs)


def _told_apart(calls: Sequence[Call]) -> list[Call]:
    """Return the calls with a name of its own for each; a file may have one name twice."""
    counts = Counter(call.name for call in calls)
    return [replace(call, name=f"{call.name} ({call.outputs[0]})") if counts[call.name] > 1 else call for call in calls]


def _with_entries(calls: Sequence[Call], values: Mapping[str, Array], first: str) -> tuple[list[Call], set[str]]:
    """Return the calls that the input reaches through values with entries, and the names of these values.

    A value without entries is the same for every input, and so is what is computed of nothing else. That it has none
    must not depend on the input: it is known of converted operators whose other inputs are constants.
    """
    depends, shaped, kept = {first}, {first}, list[Call]()
    for call in calls:
        if not (given := depends.intersection(call.inputs)):
            continue
        is_shaped = call.operator in OPERATORS and given <= shaped and depends.isdisjoint(call.inputs[1:])
        reached = {name for name in call.outputs if not is_shaped or name not in values or values[name].size}
        if reached:
            depends |= reached
            kept.append(call)
        if call.operator in OPERATORS and given <= shaped:
            shaped |= reached
    return kept, depends


def run_alone(call: Call, inputs: Sequence[Array | None]) -> Array:
    """Return the first output of a node for these inputs, by onnxruntime."""
    import onnxruntime  # noqa: PLC0415 - as above

    names = [f"input_{index}" if each is not None else "" for index, each in enumerate(inputs)]
    node = helper.make_node(call.operator, names, ["output"], **call.attributes)
    given = {name: each for name, each in zip(names, inputs, strict=True) if each is not None}
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in given.items()
    ]
    graph = helper.make_graph([node], "alone", declared, [helper.make_empty_tensor_value_info("output")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", call.opset)], ir_version=8)
    try:
        found: list[Array] = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        ).run(None, given)
    except Exception as error:
        raise call.refuse(f"onnxruntime cannot run it alone: {first_line(error)}") from error
    return found[0]


def call_of(node: onnx.NodeProto, index: int, opset: int) -> Call:
    inputs, outputs = tuple(node.input), tuple(node.output)
    call = Call(name_of(node, index), operator_of(node), {}, inputs, outputs, opset)
    return replace(call, attributes={entry.name: _attribute(call, entry) for entry in node.attribute})


def _attribute(call: Call, entry: onnx.AttributeProto) -> Any:
    try:
        value = helper.get_attribute_value(entry)
        if isinstance(value, bytes):
            return value.decode()
        if entry.type == onnx.AttributeProto.STRINGS:
            return [each.decode() for each in value]
        return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value
    except (TypeError, ValueError, KeyError) as error:
        raise call.refuse(f"attribute {entry.name!r} cannot be read: {first_line(error)}") from error


def values_of(model: onnx.ModelProto, names: set[str]) -> dict[str, Array]:
    """Return every named value, for an input of zeros: the constants' own, the others for their shapes."""
    known = {tensor.name: _array(tensor) for tensor in model.graph.initializer if tensor.name in names}
    given = graph_input(model)
    if given.name in names:
        known[given.name] = np.zeros(batch_of_one(given), FLOATS[given.type.tensor_type.elem_type])
    inner = sorted(names - known.keys())
    if not inner:
        return known
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    exposed.graph.ClearField("output")
    exposed.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in inner)
    runtime = Runtime(exposed, inner)
    return known | dict(zip(inner, runtime(np.zeros(runtime.shape)), strict=True))


def _array(tensor: TensorProto) -> Array:
    try:
        return numpy_helper.to_array(tensor)
    except (TypeError, ValueError, KeyError) as error:
        reason = f"initializer {tensor.name!r} cannot be read: {first_line(error)}"
        raise UnsupportedModelError(reason) from error
