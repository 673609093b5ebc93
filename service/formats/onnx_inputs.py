"""The inputs of an ONNX file as one of real numbers: their entries side by side, in the file's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_INTEGERS = frozenset(
    getattr(TensorProto, name) for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
)
SLICES_BY_INPUTS = 10
"""The opset from which ``Slice`` has its places as inputs, and not as attributes."""


def inputs_of(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that are not initializers."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def with_real_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with a floating-point input in the place of each one of integers, which are the whole numbers
    that are nearest to its entries; of two that are as near, the larger.
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
            helper.make_node("Cast", [f"{real}.whole"], [name], to=integer),
        ]
        value.name, value.type.tensor_type.elem_type = real, kind
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*added, *nodes])
    return model


def with_one_input(
    model: onnx.ModelProto, opset: int, shape_of: Callable[[onnx.ValueInfoProto], tuple[int, ...]]
) -> onnx.ModelProto:
    """Return the model with one input ``(1, entries)`` that its own are cut out of, where it has several of one type.

    ``shape_of`` gives their shapes at a batch of one.
    """
    given = inputs_of(model)
    kinds = {value.type.tensor_type.elem_type for value in given}
    if len(given) < 2 or len(kinds) > 1:
        return model
    shapes = [shape_of(value) for value in given]
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
