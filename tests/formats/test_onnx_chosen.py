"""What a spec chooses of an ONNX file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from service.bounds.onnx import load
from service.formats.onnx import ChoiceError, OnnxError, chosen, outline_of
from service.jobs.spec.verify import FromOnnx

FILE = "file_" + "0a" * 32


def classifier() -> bytes:
    """``scores``, their softmax ``p`` and its ``label``; of a ``(batch, width)`` input, ``bias`` and a ``mask``."""
    given = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "width"]),
        helper.make_tensor_value_info("bias", TensorProto.FLOAT, ["batch", "width"]),
        helper.make_tensor_value_info("mask", TensorProto.BOOL, ["batch", "width"]),
        helper.make_tensor_value_info("rows", TensorProto.INT64, [2]),
    ]
    nodes = [
        helper.make_node("Add", ["x", "bias"], ["moved"]),
        helper.make_node("Where", ["mask", "moved", "zero"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["p"], axis=1),
        helper.make_node("ArgMax", ["p"], ["label"], axis=1),
        helper.make_node("NonZero", ["p"], ["none"]),
        helper.make_node("Gather", ["scores", "rows"], ["chosen"], axis=1),
    ]
    wanted = [
        helper.make_tensor_value_info("label", TensorProto.INT64, ["batch", 1]),
        helper.make_tensor_value_info("p", TensorProto.FLOAT, ["batch", "width"]),
        helper.make_tensor_value_info("chosen", TensorProto.FLOAT, ["batch", 2]),
    ]
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    graph = helper.make_graph(nodes, "g", given, wanted, [zero])
    content: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    return content


def choice(**fields: object) -> FromOnnx:
    return FromOnnx.model_validate({"onnx": FILE, **fields})


FIXED = {"dimensions": {"width": 3}, "inputs": {"bias": [0.5, 0.0, -1.0], "mask": 1, "rows": [2, 0]}}
X = torch.tensor([[1.0, 2.0, 4.0]])
SCORES = X + torch.tensor([[0.5, 0.0, -1.0]])


def test_inputs_are_fixed_and_lengths_set_and_what_can_be_bounded_is() -> None:
    made = chosen(classifier(), choice(**FIXED))
    outline = outline_of(made)
    assert (outline.inputs, outline.names, outline.unsupported) == (3, ("p", "chosen"), ())
    assert torch.allclose(load(made)(X), torch.cat([SCORES.softmax(1), SCORES[:, [2, 0]]], dim=1))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["p"], SCORES.softmax(1)),
        (["chosen"], SCORES[:, [2, 0]]),
        (["scores"], SCORES),
        (["label", "p"], torch.cat([SCORES.argmax(1, keepdim=True), SCORES.softmax(1)], dim=1)),
    ],
    ids=["an output", "another", "a value within", "a label"],
)
def test_outputs_are_chosen_by_name(names: list[str], expected: torch.Tensor) -> None:
    made = chosen(classifier(), choice(outputs=names, **FIXED))
    assert outline_of(made).names == tuple(names)
    assert torch.allclose(load(made)(X), expected)


def test_outputs_come_in_the_order_in_which_they_are_named() -> None:
    made = chosen(classifier(), choice(outputs=["chosen", "scores"], **FIXED))
    assert torch.allclose(load(made)(X), torch.cat([SCORES[:, [2, 0]], SCORES], dim=1))


@pytest.mark.parametrize(
    ("fields", "field", "words", "expected"),
    [
        ({"outputs": ["q"]}, "model.outputs", "no value 'q'", "'label', 'p', 'chosen'"),
        ({"outputs": ["p", "none"], **FIXED}, "model.outputs", "'none' needs ONNX NonZero", "'p'"),
        ({"inputs": {"z": 0}}, "model.inputs", "no input 'z'", "'x', 'bias', 'mask', 'rows'"),
        ({"inputs": {"rows": [1, 2, 3]}}, "model.inputs", "'rows' is fixed to 3 numbers", "the 2 of its shape [2]"),
        ({"inputs": {"rows": 0.5}}, "model.inputs", "fixed to what no INT64 is", "whole numbers"),
        ({"dimensions": {"depth": 3}}, "model.dimensions", "no length 'depth' open", "'batch', 'width'"),
    ],
    ids=["output", "operator", "input", "count", "fraction", "dimension"],
)
def test_what_a_file_does_not_have_is_refused_with_what_it_has(
    fields: dict[str, object], field: str, words: str, expected: str
) -> None:
    with pytest.raises(ChoiceError) as error:
        chosen(classifier(), choice(**fields))
    assert error.value.field == field
    assert words in str(error.value)
    assert expected in error.value.expected


def test_refusals_name_what_can_be_set() -> None:
    with pytest.raises(OnnxError, match=r"'mask' is BOOL; .* \(model.inputs\)"):
        outline_of(classifier())
    with pytest.raises(OnnxError, match=r"shape \(batch, width\): .* model.dimensions sets width"):
        chosen(classifier(), choice(inputs={"mask": 1}))
    with pytest.raises(ChoiceError, match="every input"):
        chosen(classifier(), choice(dimensions={"width": 3}, inputs={**FIXED["inputs"], "x": 0}))


def test_inputs_of_whole_numbers_are_the_nearest_ones() -> None:
    given = [helper.make_tensor_value_info("x", TensorProto.INT64, [1, 3])]
    wanted = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])]
    nodes = [helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT), helper.make_node("Relu", ["f"], ["y"])]
    model = helper.make_model(
        helper.make_graph(nodes, "g", given, wanted), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    assert load(model.SerializeToString())(torch.tensor([[1.4, 1.6, -2.7]])).tolist() == [[1.0, 2.0, 0.0]]
