"""Writes out the functions of an ONNX file, its own and some of ONNX's, at their calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
from onnx import helper, inliner

from service.formats.onnx.dependence import graphs_in

MOST_NODES = 2**17
"""The most nodes of a model whose functions are written out: a function that calls another twice doubles it."""

_OF_ONNX = frozenset(
    [
        "AffineGrid",
        "CastLike",
        "CenterCropPad",
        "NegativeLogLikelihoodLoss",
        "RotaryEmbedding",
        "SoftmaxCrossEntropyLoss",
    ]
)
"""Operators that ONNX itself defines by others, and that have no rule of their own."""
Key = tuple[str, str, str]
"""A function's domain, name and overload."""


class FunctionError(ValueError):
    """The functions call each other in a circle, or make too many nodes."""


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without functions of its own, and without ONNX's. Raises :class:`FunctionError`."""
    is_there = not _OF_ONNX.isdisjoint(node.op_type for node in _nodes_of(model) if node.domain in ("", "ai.onnx"))
    if not model.functions:
        return _written_out(model) if is_there else model
    functions = {(each.domain, each.name, each.overload): each for each in model.functions}
    sizes: dict[Key, int] = {}
    total = _size(model.graph.node, functions, sizes, ())
    if total > MOST_NODES:
        many = total if total < 10**12 else "very many"
        raise FunctionError(f"its functions come to {many} nodes where they are called; at most {MOST_NODES} are read")
    try:
        model = inliner.inline_local_functions(model)
    except Exception as error:  # the inliner raises types of C++
        raise FunctionError(f"its functions cannot be written out: {error}") from error
    return _written_out(model) if is_there else model


def _written_out(model: onnx.ModelProto) -> onnx.ModelProto:
    names = [("", name) for name in sorted(_OF_ONNX)]
    typed = onnx.ModelProto()
    typed.CopyFrom(model)
    given = {each.name for each in (*model.graph.input, *model.graph.value_info)}
    for each in model.graph.initializer:  # the inliner knows no others' types
        if each.name not in given:
            typed.graph.value_info.append(helper.make_tensor_value_info(each.name, each.data_type, each.dims))
    try:
        return inliner.inline_selected_functions(typed, names, exclude=False, inline_schema_functions=True)
    except Exception as error:
        raise FunctionError(f"{', '.join(sorted(_OF_ONNX))} cannot be written out: {error}") from error


def _nodes_of(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes of the file, also those in functions and in graphs of nodes."""
    left = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while left:
        node = left.pop()
        left += [inner for graph in graphs_in(node) for inner in graph.node]
        yield node


def _size(
    nodes: Iterable[onnx.NodeProto],
    functions: Mapping[Key, onnx.FunctionProto],
    sizes: dict[Key, int],
    callers: tuple[Key, ...],
) -> int:
    """Return the number of nodes, those of functions counted at each call; ``sizes`` are the known counts."""
    total = 0
    for node in nodes:
        total += 1 + sum(_size(graph.node, functions, sizes, callers) for graph in graphs_in(node))
        key = (node.domain, node.op_type, node.overload)
        if key in callers:
            raise FunctionError(f"function {node.op_type!r} calls itself")
        if key in functions and key not in sizes:
            sizes[key] = _size(functions[key].node, functions, sizes, (*callers, key))
        total += sizes.get(key, 0)
    return total
