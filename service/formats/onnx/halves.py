"""Finds whether a model is in half precision, and writes bfloat16, which no CPU's onnxruntime runs, as float32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from service.formats.onnx.dependence import graphs_in

_HALVES = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}
_PRECISION = "trivet.precision"


def precision_of(model: onnx.ModelProto) -> str | None:
    """Return the half precision that occurred in a model when it was read; ``None`` if none did."""
    return next((str(each.value) for each in model.metadata_props if each.key == _PRECISION), None)


def with_precision_told(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its :func:`precision_of` noted, and with float32 in place of bfloat16: every
    bfloat16 number is a float32 number, too.
    """
    kept = [each for each in model.metadata_props if each.key != _PRECISION]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    types = {_type(each) for each in _typed(model.graph)}
    found = [name for kind, name in _HALVES.items() if kind in types]
    if found:
        model.metadata_props.add(key=_PRECISION, value=" and ".join(found))
    if TensorProto.BFLOAT16 in types:
        for each in _typed(model.graph):
            _widen(each)
    return model


_Typed = TensorProto | onnx.ValueInfoProto | onnx.AttributeProto


def _typed(graph: onnx.GraphProto) -> Iterator[_Typed]:
    """Yield everything with a number type: tensors, declared values, and the targets of casts."""
    yield from graph.initializer
    yield from (*graph.input, *graph.output, *graph.value_info)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if (node.op_type, attribute.name) in {("Cast", "to"), ("QuantizeLinear", "output_dtype")}:
                yield attribute
        for inner in graphs_in(node):
            yield from _typed(inner)


def _type(typed: _Typed) -> int:
    if isinstance(typed, TensorProto):
        return int(typed.data_type)
    return int(typed.i) if isinstance(typed, onnx.AttributeProto) else int(typed.type.tensor_type.elem_type)


def _widen(typed: _Typed) -> None:
    if _type(typed) != TensorProto.BFLOAT16:
        return
    if isinstance(typed, TensorProto):
        name = typed.name
        typed.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(typed).astype(np.float32), name))
    elif isinstance(typed, onnx.AttributeProto):
        typed.i = TensorProto.FLOAT
    else:
        typed.type.tensor_type.elem_type = TensorProto.FLOAT
