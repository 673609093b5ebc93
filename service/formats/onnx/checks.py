"""Checks the names, tensors, attributes and operators of an ONNX file before anything relies on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isfinite, isnan, prod

import onnx
from onnx import TensorProto, helper, numpy_helper

from service.formats.onnx.dependence import graphs_in
from service.formats.onnx.kinds import FLOATS, OnnxError, type_name

_NUMBERS = (
    *FLOATS, TensorProto.BFLOAT16, TensorProto.BOOL,
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
)  # fmt: skip
_DRAWING = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators whose result is another one at each run."""
_MAY_BE_INFINITE = {"Clip", "Constant", "Pad"}
"""Operators whose attributes may be infinite: as no limit, or as a number below every value."""
_BITS: Mapping[int, int] = {
    **{kind: 8 * helper.tensor_dtype_to_np_dtype(kind).itemsize for kind in _NUMBERS},
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
}
"""The bits of an entry, by its type."""


def check_texts(model: onnx.ModelProto) -> None:
    """Check that names are text: protobuf passes on bytes that are not UTF-8."""
    graph = model.graph
    named = (*graph.input, *graph.output, *graph.initializer, *graph.node, *model.opset_import)
    texts = [each.domain if isinstance(each, onnx.OperatorSetIdProto) else each.name for each in named]
    for node in graph.node:
        texts += [node.op_type, node.domain, *node.input, *node.output, *(each.name for each in node.attribute)]
    for text in texts:
        if not isinstance(text, str):
            raise OnnxError(f"the name {text[:60]!r} is not UTF-8")


def check_repeatable(model: onnx.ModelProto) -> None:
    """Check that each run gives the same, and that ONNX's operators are those that ONNX defines."""
    for function in model.functions:
        if function.domain in ("", "ai.onnx"):
            raise OnnxError(f"function {function.name!r} takes the place of an operator of ONNX")
    open_: list[onnx.GraphProto | onnx.FunctionProto] = [model.graph, *model.functions]
    while open_:
        graph = open_.pop()
        for index, node in enumerate(graph.node):
            open_ += graphs_in(node)
            if node.op_type in _DRAWING:
                raise OnnxError(f"ONNX {node.op_type} (node {name_of(node, index)!r}) draws random numbers")
            if node.op_type == "Dropout" and not all(_is_false(graph, name) for name in node.input[2:]):
                raise OnnxError(f"ONNX Dropout (node {name_of(node, index)!r}): only training_mode false is supported")


def _is_false(graph: onnx.GraphProto | onnx.FunctionProto, name: str) -> bool:
    """Return whether a value is left out, or is false by an initializer or a ``Constant``."""
    known = [each for each in getattr(graph, "initializer", ()) if each.name == name]
    for node in graph.node:
        if node.op_type == "Constant" and name in node.output:
            known += [attribute.t for attribute in node.attribute if attribute.name == "value"]
    return not name or (bool(known) and not numpy_helper.to_array(known[0]).any())


def tensors_in(model: onnx.ModelProto) -> Iterator[tuple[str, TensorProto]]:
    """Yield every tensor of the file, with words for its place."""
    yield from _tensors_of(model.graph)
    for where, _, attribute in attributes_of(model):
        dense = [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
        sparse = [
            *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
            *attribute.sparse_tensors,
        ]
        yield from ((where, each) for each in (*dense, *_parts(sparse)))
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from _tensors_of(graph)


def _tensors_of(graph: onnx.GraphProto) -> Iterator[tuple[str, TensorProto]]:
    yield from ((f"initializer {each.name!r}", each) for each in graph.initializer)
    yield from ((f"sparse initializer {each.name!r}", each) for each in _parts(graph.sparse_initializer))


def _parts(sparse: Iterable[onnx.SparseTensorProto]) -> list[TensorProto]:
    return [part for each in sparse for part in (each.values, each.indices)]


def attributes_of(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.NodeProto, onnx.AttributeProto]]:
    """Yield every attribute of every node, also in graphs within attributes and in functions, with a phrase for its
    place.
    """
    open_ = [model.graph.node, *(function.node for function in model.functions)]
    while open_:
        for index, node in enumerate(open_.pop()):
            for attribute in node.attribute:
                yield f"attribute {attribute.name!r} of node {name_of(node, index)!r}", node, attribute
            open_ += [graph.node for graph in graphs_in(node)]


def check_tensor(where: str, tensor: TensorProto) -> None:
    """Check that the tensor has as many numbers, here and in no other file, as its type and its shape require."""
    if tensor.data_location == TensorProto.EXTERNAL:
        raise OnnxError(
            f"{where} is kept in another file; expected a zip of the model and that file, or one file, as "
            "torch.onnx.export(…, external_data=False) writes it"
        )
    if tensor.data_type == TensorProto.STRING:
        return  # names of classes, which only a label reads: it is no number, and left out
    if tensor.data_type not in _BITS:
        raise OnnxError(f"{where} is of type {type_name(tensor.data_type)}; expected one of numbers")
    shape = list(tensor.dims)
    if any(length < 0 for length in shape):
        raise OnnxError(f"{where} has shape {shape}; expected no negative length")
    entries, bits = prod(shape), _BITS[tensor.data_type]
    if tensor.HasField("raw_data"):
        found, expected, unit = len(tensor.raw_data), -(-entries * bits // 8), "bytes"
    else:
        field, unit = helper.tensor_dtype_to_field(tensor.data_type), "numbers"
        found, expected = len(getattr(tensor, field)), -(-entries * bits // 8) if bits < 8 else entries
    if found != expected:
        shown = f"shape {shape[:8]} of {type_name(tensor.data_type)}"
        raise OnnxError(f"{where} has {found} {unit}; expected {expected if expected < 10**18 else 'more'} for {shown}")


def check_numbers(where: str, node: onnx.NodeProto, attribute: onnx.AttributeProto) -> None:
    refused = isnan if node.op_type in _MAY_BE_INFINITE else lambda each: not isfinite(each)
    for number in filter(refused, [attribute.f, *attribute.floats]):
        raise OnnxError(f"{where} is {number}; expected a finite number")


def name_of(node: onnx.NodeProto, index: int) -> str:
    return node.name or f"{node.op_type}_{index}"
