"""Finds the loops of an ONNX graph with a constant number of rounds, and the sequences of tensors, that can be
written out.

Exporters write a ``Loop`` for a loop of a scripted module, a ``Scan`` for a recurrent layer, and sequences for lists.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import helper, numpy_helper

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


def is_counted(node: onnx.NodeProto, values: Collection[str], varying: Collection[str]) -> bool:
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
    constants = {tensor.name: tensor for tensor in body.initializer}
    if name in given_by and given_by[name].op_type == "Constant":
        constants |= {name: helper.get_node_attr_value(given_by[name], "value")}
    if name in constants:
        return bool(numpy_helper.to_array(constants[name]).all())
    return None if name in given_by or name in {each.name for each in body.input} else name
