"""Which outputs of an ONNX file are bounded."""

from __future__ import annotations

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from service.bounds.onnx import load
from service.formats.onnx import outline_of

SCORES = [helper.make_node("Softmax", ["x"], ["scores"]), helper.make_node("ArgMax", ["scores"], ["label"], axis=1)]
ZIPPED = helper.make_node("ZipMap", ["scores"], ["map"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2])


def classifier(nodes: list[onnx.NodeProto], *outputs: onnx.ValueInfoProto) -> bytes:
    """Scores of three entries."""
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, "g", [given], outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    content: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return content


LABEL = helper.make_tensor_value_info("label", TensorProto.INT64, ["batch", 1])
TENSOR = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 3])
MAP = helper.make_value_info(
    "map",
    helper.make_sequence_type_proto(
        helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    ),
)


@pytest.mark.parametrize(
    "content",
    [classifier(SCORES, TENSOR, LABEL), classifier([*SCORES, ZIPPED], LABEL, MAP)],
    ids=["tensor", "map"],
)
def test_a_label_beside_its_scores_is_left_out(content: bytes) -> None:
    outline, x = outline_of(content), torch.tensor([[0.0, 1.0, -2.0]])
    assert (outline.inputs, outline.unsupported) == (3, ())
    assert torch.equal(load(content)(x), x.softmax(1))


def test_a_label_alone_is_refused() -> None:
    (words,) = outline_of(classifier(SCORES, LABEL)).unsupported
    assert words.startswith("ONNX ArgMax (node 'ArgMax_1'), as it gives the place of the largest of 'scores'")
