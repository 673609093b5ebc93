"""Local functions of an ONNX file, which are written out where they are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import inliner

from service.formats.onnx_dependence import graphs_in

MOST_NODES = 2**17
"""Nodes of a model whose functions are written out: a function that calls another twice doubles it."""

Key = tuple[str, str, str]
"""A function's domain, name and overload."""


class FunctionError(ValueError):
    """The functions call each other in a circle, or come to too many nodes."""


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without functions of its own. Raises :class:`FunctionError`."""
    if not model.functions:
        return model
    functions = {(each.domain, each.name, each.overload): each for each in model.functions}
    sizes: dict[Key, int] = {}
    total = _size(model.graph.node, functions, sizes, ())
    if total > MOST_NODES:
        many = total if total < 10**12 else "very many"
        raise FunctionError(f"its functions come to {many} nodes where they are called; at most {MOST_NODES} are read")
    try:
        return inliner.inline_local_functions(model)
    except Exception as error:  # the inliner raises types of C++
        raise FunctionError(f"its functions cannot be written out: {error}") from error


def _size(
    nodes: Iterable[onnx.NodeProto],
    functions: Mapping[Key, onnx.FunctionProto],
    sizes: dict[Key, int],
    callers: tuple[Key, ...],
) -> int:
    """Return the number of nodes, those of functions counted at each call; ``sizes`` are those that are known."""
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
