"""Joins the inputs of an ONNX file into one of real numbers, side by side in the file's order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from service.formats.onnx.kinds import FLOATS, OnnxError, type_name

_INTEGERS = frozenset(
    getattr(TensorProto, name) for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
)
_SMALL = frozenset(getattr(TensorProto, name) for name in ("INT8", "INT16", "UINT8", "UINT16"))
MOST_ENTRIES = 2**24
"""The most entries of a model's input, and of an output, for a batch of one."""
CLIPS_BY_INPUTS = 11
"""The opset from which ``Clip`` has its ends as inputs, and not as attributes."""
SLICES_BY_INPUTS = 10
"""The opset from which ``Slice`` has its places as inputs, and not as attributes."""


def inputs_of(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that are not initializers."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def graph_input(model: onnx.ModelProto) -> onnx.ValueInfoProto:
    """Return the one input of a model; a tensor of floating-point numbers."""
    return inputs_of(model)[0]


def lengths_of(value: onnx.ValueInfoProto) -> list[int]:
    """Return the lengths, 0 for an open one. Raises :class:`OnnxError` if their product exceeds that of any model."""
    lengths = [int(dim.dim_value) for dim in value.type.tensor_type.shape.dim]
    entries = 1
    for length in lengths:
        entries *= max(length, 1)
        if entries > MOST_ENTRIES:
            raise OnnxError(f"{value.name!r} has shape {lengths[:8]}; at most {MOST_ENTRIES} entries are supported")
    return lengths


def batch_of_one(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    """Return the input's shape; only its first dimension may be open."""
    if not value.type.tensor_type.HasField("shape"):
        raise OnnxError(f"input {value.name!r} has no shape; expected its lengths, of which the first may be open")
    lengths = lengths_of(value)
    if any(length < 1 for length in lengths[1:]):
        named = open_lengths(value)
        shown = ", ".join(named.get(place, str(length)) for place, length in enumerate(lengths))
        left = ", ".join(name for place, name in named.items() if place)
        raise OnnxError(
            f"input {value.name!r} has shape ({shown}): only its first length may be open; model.dimensions sets {left}"
        )
    return tuple(max(length, 1) for length in lengths)


def open_lengths(value: onnx.ValueInfoProto) -> dict[int, str]:
    """Return the names of the lengths that the file leaves open, by their places."""
    dims = enumerate(value.type.tensor_type.shape.dim)
    return {place: dim.dim_param or f"{value.name}.{place}" for place, dim in dims if dim.dim_value < 1}


def check_inputs(model: onnx.ModelProto) -> None:
    """Check that there are inputs, all of one floating-point type."""
    found = inputs_of(model)
    if not found:
        raise OnnxError("the model has no inputs; expected one or more")
    first = found[0].type.tensor_type.elem_type
    for value in found:
        kind = value.type.tensor_type.elem_type
        if kind not in FLOATS:
            expected = "a tensor of numbers, or a fixed one (model.inputs)"
            raise OnnxError(f"input {value.name!r} is {type_name(kind)}; expected {expected}")
        if kind != first:
            expected = f"{type_name(first)}, as {found[0].name!r} is"
            raise OnnxError(f"input {value.name!r} is {type_name(kind)}; expected {expected}")


def with_real_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with a floating-point input in place of each integer one; the integers are the whole
    numbers nearest to its entries, and of two equally near ones the larger; beyond the ends of a small type, its ends.
    """
    given = inputs_of(model)
    kinds = [value.type.tensor_type.elem_type for value in given]
    kind = next((each for each in kinds if each not in _INTEGERS), TensorProto.FLOAT)
    added = list[onnx.NodeProto]()
    for value, integer in zip(given, kinds, strict=True):
        if integer not in _INTEGERS:
            continue
        name, real = value.name, _free_name(model, f"{value.name}.real")
        half = np.array(0.5, helper.tensor_dtype_to_np_dtype(kind))
        model.graph.initializer.append(numpy_helper.from_array(half, f"{real}.half"))
        added += [
            helper.make_node("Add", [real, f"{real}.half"], [f"{real}.more"]),
            helper.make_node("Floor", [f"{real}.more"], [f"{real}.whole"]),
        ]
        clip = _within(model, integer, kind, f"{real}.whole", f"{real}.held")
        added += [*clip, helper.make_node("Cast", [f"{real}.held" if clip else f"{real}.whole"], [name], to=integer)]
        value.name, value.type.tensor_type.elem_type = real, kind
    return _beginning_with(added, model)


def _beginning_with(added: Sequence[onnx.NodeProto], model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with these nodes before its own."""
    nodes = [*added, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def with_narrow_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with float32 inputs in place of float64 ones if it computes in float32, too: its values are then
    no more exact than those of a model that takes float32.
    """
    given = [each for each in inputs_of(model) if each.type.tensor_type.elem_type == TensorProto.DOUBLE]
    if not given or not _computes_in_float32(model.graph):
        return model
    added = list[onnx.NodeProto]()
    for value in given:
        name, value.name = value.name, _free_name(model, f"{value.name}.narrow")
        value.type.tensor_type.elem_type = TensorProto.FLOAT
        added.append(helper.make_node("Cast", [value.name], [name], to=TensorProto.DOUBLE))
    return _beginning_with(added, model)


def _computes_in_float32(graph: onnx.GraphProto) -> bool:
    """Return whether a float64 graph computes an output that is no label from float32 values. An output that is only
    itself given in float32 is computed in float64.
    """
    wanted = {each.name for each in graph.output if each.type.tensor_type.elem_type in _WITH_FRACTIONS}
    wide = {each.name for each in graph.initializer if each.data_type == TensorProto.DOUBLE}
    last = {each.name for each in graph.output}
    for node in reversed(graph.node):
        if wanted.isdisjoint(node.output):
            continue
        inner = [each for attribute in node.attribute for each in (attribute.g, *attribute.graphs)]
        inside = [one for each in inner for one in _nodes_of(each)]
        if last.isdisjoint(node.output) and any(_narrows(each, wide) for each in (node, *inside)):
            return True
        wanted.update(node.input, *(each.input for each in inside))
    return False


_WITH_FRACTIONS = (TensorProto.UNDEFINED, TensorProto.FLOAT, TensorProto.DOUBLE)


def _nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes_of(inner)


def _narrows(node: onnx.NodeProto, wide: Collection[str]) -> bool:
    """Return whether a node of a float64 model may give float32; ``wide`` are constants of float64."""
    if node.op_type == "Cast":
        return any(each.name == "to" and each.i == TensorProto.FLOAT for each in node.attribute)
    return node.op_type == "DequantizeLinear" or (node.op_type == "CastLike" and node.input[1] not in wide)


def _within(model: onnx.ModelProto, integer: int, kind: int, source: str, target: str) -> list[onnx.NodeProto]:
    """Return the nodes that clip whole numbers to those of a small type, which would wrap around beyond."""
    if integer not in _SMALL:
        return []
    ends = np.iinfo(helper.tensor_dtype_to_np_dtype(integer))
    if next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx")) < CLIPS_BY_INPUTS:
        return [helper.make_node("Clip", [source], [target], min=float(ends.min), max=float(ends.max))]
    names = [f"{target}.least", f"{target}.most"]
    for name, end in zip(names, (ends.min, ends.max), strict=True):
        number = np.array(end, helper.tensor_dtype_to_np_dtype(kind))
        model.graph.initializer.append(numpy_helper.from_array(number, name))
    return [helper.make_node("Clip", [source, *names], [target])]


def with_one_input(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Return the model with one input ``(1, entries)`` from which its own are cut, if it has several of a type."""
    given = inputs_of(model)
    kinds = {value.type.tensor_type.elem_type for value in given}
    if len(given) < 2 or len(kinds) > 1:
        return model
    shapes = [batch_of_one(value) for value in given]
    ends = np.cumsum([prod(shape) for shape in shapes]).tolist()
    together = _free_name(model, "inputs")
    nodes = list(model.graph.node)
    others = [value for value in model.graph.input if value not in given]
    del model.graph.node[:], model.graph.input[:]
    model.graph.input.append(helper.make_tensor_value_info(together, kinds.pop(), [1, ends[-1]]))
    model.graph.input.extend(others)
    for value, shape, start, end in zip(given, shapes, [0, *ends], ends, strict=False):
        flat = f"{together}.{value.name}"
        model.graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), f"{flat}.shape"))
        model.graph.node.append(_slice(model.graph, opset, (together, flat), (start, end)))
        model.graph.node.append(helper.make_node("Reshape", [flat, f"{flat}.shape"], [value.name]))
    model.graph.node.extend(nodes)
    return model


def _slice(graph: onnx.GraphProto, opset: int, names: tuple[str, str], ends: tuple[int, int]) -> onnx.NodeProto:
    """Return the node that cuts entries out of the first of ``names``, as the second."""
    source, target = names
    if opset < SLICES_BY_INPUTS:
        return helper.make_node("Slice", [source], [target], starts=ends[:1], ends=ends[1:], axes=[1])
    places = [f"{target}.{name}" for name in ("start", "end", "axis")]
    for name, number in zip(places, (*ends, 1), strict=True):
        graph.initializer.append(numpy_helper.from_array(np.array([number], np.int64), name))
    return helper.make_node("Slice", [source, *places], [target])


def _free_name(model: onnx.ModelProto, name: str) -> str:
    graph = model.graph
    known: Sequence[str] = [name for node in graph.node for name in (*node.input, *node.output)]
    known = [*known, *(each.name for each in (*graph.input, *graph.output, *graph.initializer))]
    while any(each.startswith(name) for each in known):
        name += "_"
    return name
