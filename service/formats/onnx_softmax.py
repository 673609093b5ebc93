"""Removes guards that exporters put behind a softmax: they replace a row that is NaN, because its mask left nothing, by
0.

``Where(IsNaN(p), 0, p)`` is ``p`` wherever ``p = Softmax(…)`` is a number. A row whose mask leaves nothing is NaN for
every input and has no finite bounds, so nothing is claimed about it. Scores that are all −∞ for some inputs only come
from a logarithm: behind one the guard stays, and is refused.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper, numpy_helper

from service.formats.onnx_dependence import ordered, read_by

_MAY_BE_INFINITE = frozenset({"Log", "ReduceLogSum", "ReduceLogSumExp", "LogSoftmax"})


def without_nan_guards(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the softmax itself in place of each guard, if the two are the same."""
    nodes = [node for _, node in ordered(model.graph.node)]
    given_by = {name: node for node in nodes for name in node.output if name}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    written = [(node.output[0], each) for node in nodes if node.op_type == "Constant" for each in node.attribute]
    constants |= {name: attribute.t for name, attribute in written if attribute.name == "value"}
    infinite = _behind_logarithms(nodes)
    for node in model.graph.node:
        if node.op_type != "Where" or node.domain not in ("", "ai.onnx"):
            continue
        asked, instead, softmax = node.input
        guard, source = given_by.get(asked), given_by.get(softmax)
        if guard is None or guard.op_type != "IsNaN" or list(guard.input) != [softmax]:
            continue
        if (
            source is not None
            and source.op_type == "Softmax"
            and softmax not in infinite
            and _is_zero(constants, instead)
        ):
            node.CopyFrom(helper.make_node("Identity", [softmax], list(node.output), name=node.name))
    return model


def _behind_logarithms(nodes: list[onnx.NodeProto]) -> set[str]:
    """Return the values that a logarithm is part of; nodes come in an order of execution."""
    found = set[str]()
    for node in nodes:
        if node.op_type in _MAY_BE_INFINITE or found & read_by(node):
            found.update(node.output)
    return found


def _is_zero(constants: dict[str, TensorProto], name: str) -> bool:
    return name in constants and not numpy_helper.to_array(constants[name]).any()
