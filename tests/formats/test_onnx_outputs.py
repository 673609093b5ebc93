"""Which outputs of an ONNX file are bounded."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from service.bounds.onnx import load
from service.formats.onnx import outline_of, with_labels

SCORES = [helper.make_node("Softmax", ["x"], ["scores"]), helper.make_node("ArgMax", ["scores"], ["label"], axis=1)]
ZIPPED = helper.make_node("ZipMap", ["scores"], ["map"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2])


def classifier(
    nodes: list[onnx.NodeProto], *outputs: onnx.ValueInfoProto, held: Sequence[onnx.TensorProto] = ()
) -> bytes:
    """Scores of three entries."""
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, "g", [given], outputs, held)
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


@pytest.mark.parametrize("made", [classifier(SCORES, LABEL), with_labels(classifier(SCORES, TENSOR, LABEL))])
def test_a_label_alone_is_bounded_and_one_that_is_asked_for(made: bytes) -> None:
    assert outline_of(made).unsupported == ()
    assert load(made)(torch.tensor([[0.0, 1.0, -2.0], [3.0, 1.0, -2.0]]))[:, -1].tolist() == [1.0, 0.0]


def test_a_query_may_count_labels_that_are_numbers() -> None:
    tensor, text = classifier(SCORES, TENSOR, LABEL), helper.make_tensor_value_info("label", TensorProto.STRING, [1, 1])
    assert (outline_of(tensor).outputs, outline_of(tensor).has_labels, outline_of(tensor).every) == (3, True, 4)
    names = helper.make_tensor("names", TensorProto.STRING, [3], [b"a", b"b", b"c"])
    place = helper.make_node("ArgMax", ["scores"], ["place"], axis=1, keepdims=0)
    named = helper.make_node("ArrayFeatureExtractor", ["names", "place"], ["label"], domain="ai.onnx.ml")
    outline = outline_of(classifier([SCORES[0], place, named], TENSOR, text, held=[names]))
    assert (outline.outputs, outline.has_labels, outline.unsupported) == (3, False, ())


def test_a_first_output_that_is_left_out_must_not_be_as_long_as_the_rest() -> None:
    """A query about one entry may mean either of them; the first one alone is what VNN-COMP reads."""
    largest = helper.make_node("ReduceMax", ["x"], ["most"], axes=[1])
    declared = helper.make_tensor_value_info("most", TensorProto.FLOAT, ["batch", 1])
    for most in (declared, helper.make_empty_tensor_value_info("most")):
        assert outline_of(classifier([*SCORES, largest], LABEL, most)).rival == "label"
        assert outline_of(classifier([*SCORES, largest], most, LABEL)).rival == ""
    assert outline_of(classifier(SCORES, LABEL, TENSOR)).rival == ""


def test_a_label_before_scores_of_unknown_length_is_no_rival_of_several() -> None:
    """As converters write a linear classifier."""
    domain = "ai.onnx.ml"
    weights = {"coefficients": [1.0] * 9, "intercepts": [0.0] * 3, "classlabels_ints": [0, 1, 2]}
    linear = helper.make_node("LinearClassifier", ["x"], ["label", "scaled"], domain=domain, **weights)
    normed = helper.make_node("Normalizer", ["scaled"], ["scores"], domain=domain, norm="L1")
    label = helper.make_tensor_value_info("label", TensorProto.INT64, ["batch"])
    outline = outline_of(classifier([linear, normed, ZIPPED], label, MAP))
    assert (outline.outputs, outline.is_unclear(3), outline.is_unclear(1)) == (None, False, True)
