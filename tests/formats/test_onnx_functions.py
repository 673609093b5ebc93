"""Local functions of ONNX files."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from service.bounds.onnx import load
from service.formats.onnx import OnnxError, parse

DOMAIN = "own"


def function(name: str, nodes: list[onnx.NodeProto]) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_function(DOMAIN, name, ["a"], ["b"], nodes, opsets)


def calling(name: str, *functions: onnx.FunctionProto) -> bytes:
    """``y = name(x)`` of two entries."""
    value = [helper.make_tensor_value_info(each, TensorProto.FLOAT, ["batch", 2]) for each in "xy"]
    graph = helper.make_graph([helper.make_node(name, ["x"], ["y"], domain=DOMAIN)], "g", value[:1], value[1:])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    content: bytes = helper.make_model(
        graph, functions=functions, opset_imports=opsets, ir_version=9
    ).SerializeToString()
    return content


def test_a_function_is_what_its_body_says() -> None:
    doubled = function("Doubled", [helper.make_node("Add", ["a", "a"], ["b"])])
    bent = [
        helper.make_node("Doubled", ["a"], ["c"], domain=DOMAIN),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Doubled", ["d"], ["b"], domain=DOMAIN),
    ]
    model = load(calling("Bent", doubled, function("Bent", bent)))
    assert model(torch.tensor([[-1.0, 3.0]])).tolist() == [[0.0, 12.0]]


def test_functions_that_never_end_or_grow_without_measure_are_refused() -> None:
    twice = [
        function(f"F{level}", [helper.make_node(f"F{level + 1}", ["a"], [each], domain=DOMAIN) for each in "cd"])
        for level in range(40)
    ]
    end = function("F40", [helper.make_node("Relu", ["a"], ["b"])])
    with pytest.raises(OnnxError, match="its functions come to very many nodes"):
        parse(calling("F0", *twice, end))
    circle = [function(a, [helper.make_node(b, ["a"], ["b"], domain=DOMAIN)]) for a, b in ("GH", "HG")]
    with pytest.raises(OnnxError, match="function 'G' calls itself"):
        parse(calling("G", *circle))


@pytest.mark.parametrize("opset", [22, 23, 24])
def test_newer_opsets_are_read(opset: int) -> None:
    value = [helper.make_tensor_value_info(each, TensorProto.FLOAT, ["batch", 2]) for each in "xy"]
    nodes = [helper.make_node("Softmax", ["x"], ["s"]), helper.make_node("Elu", ["s"], ["y"])]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    found = load(proto.SerializeToString())(torch.zeros(1, 2))
    assert np.allclose(found.numpy(), 0.5)
