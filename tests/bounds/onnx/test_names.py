"""Operations of a graph are known by the names that the ONNX file gives its nodes."""

from __future__ import annotations

from onnx import TensorProto, helper

from service.bounds.capture import capture
from service.bounds.onnx.model import OnnxModel
from service.bounds.onnx.reading import describe


def test_each_operation_has_the_name_of_its_node() -> None:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 4)) for name in ("x", "y")]
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="/encoder/act/Relu"),
        helper.make_node("Tanh", ["a"], ["b"], name="/head/Tanh"),
        helper.make_node("Sigmoid", ["b"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "network", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    named = {node.operator: node.source for node in capture(OnnxModel(describe(model)), (4,)).nodes}
    assert named["aten.relu.default"] == "/encoder/act/Relu"
    assert named["aten.tanh.default"] == "/head/Tanh"
    assert named["aten.sigmoid.default"]
