"""ONNX files with several inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_models import model, node

from service.bounds.onnx import load
from service.formats.onnx import OnnxError, outline_of, parse


def two(opset: int = 17, second: int = TensorProto.FLOAT) -> bytes:
    """``y = relu(inputs · first)``, the first of two entries, the second a matrix of them; one name is taken."""
    given = [
        helper.make_tensor_value_info("first", TensorProto.FLOAT, ["batch", 2]),
        helper.make_tensor_value_info("inputs", second, [2, 3]),
    ]
    wanted = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])]
    nodes = [helper.make_node("MatMul", ["first", "inputs"], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    made = helper.make_model(
        helper.make_graph(nodes, "g", given, wanted), opset_imports=[helper.make_opsetid("", opset)], ir_version=8
    )
    content: bytes = made.SerializeToString()
    return content


@pytest.mark.parametrize("opset", [9, 17])
def test_several_inputs_are_one_side_by_side(opset: int) -> None:
    assert outline_of(two(opset)).inputs == 8
    x = torch.tensor([[1.0, 2.0, 1.0, 0.0, -1.0, 0.5, 1.0, -3.0], [0.0, 1.0, 9.0, 9.0, 9.0, 1.0, 2.0, 3.0]])
    assert load(two(opset))(x).tolist() == [[2.0, 2.0, 0.0], [1.0, 2.0, 3.0]]


def test_inputs_that_are_no_numbers_are_named() -> None:
    with pytest.raises(OnnxError, match="input 'inputs' is BOOL; expected a tensor of numbers, or a fixed one"):
        parse(two(second=TensorProto.BOOL))
    with pytest.raises(OnnxError, match="input 'inputs' is DOUBLE; expected FLOAT, as 'first' is"):
        parse(two(second=TensorProto.DOUBLE))
    unknown = onnx.load_from_string(two())
    unknown.graph.input[1].type.tensor_type.ClearField("shape")
    with pytest.raises(OnnxError, match="input 'inputs' has no shape; expected its lengths"):
        parse(unknown.SerializeToString())


def test_a_float64_model_that_computes_in_float32_is_one_of_float32() -> None:
    """Its margins for rounding must be those of float32, and a number that overflows there is no number."""
    casts = [node("Cast", ["x"], "f", to=TensorProto.FLOAT), node("Relu", ["f"], "r")]
    narrow = model([*casts, node("Cast", ["r"], to=TensorProto.DOUBLE)], [1, 2], kind=TensorProto.DOUBLE)
    for content, kind in ((narrow, torch.float32), (model([node("Relu", ["x"])], [1, 2], kind=11), torch.float64)):
        found = load(content)
        assert found.type_of_all.dtype is kind
        assert found(torch.tensor([[0.5, -1.0]], dtype=kind)).tolist() == [[0.5, 0.0]]


def sparse(places: list[Any]) -> onnx.SparseTensorProto:
    """2 and 3 at these places of three rows of two numbers."""
    values = numpy_helper.from_array(np.array([2.0, 3.0], np.float32), "w")
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(places)), [3, 2])


@pytest.mark.parametrize("places", [[1, 4], [[0, 1], [2, 0]]])
def test_sparse_tensors_are_those_that_onnxruntime_makes_dense(places: list[Any]) -> None:
    made = onnx.load_from_string(model([node("MatMul", ["x", "w"])], [1, 3]))
    made.graph.sparse_initializer.append(sparse(places))
    constant = model([node("Constant", [], "w", sparse_value=sparse(places)), node("MatMul", ["x", "w"])], [1, 3])
    for content in (made.SerializeToString(), constant):
        assert load(content)(torch.tensor([[1.0, 10.0, 100.0]])).tolist() == [[300.0, 2.0]]


@pytest.mark.parametrize(("places", "shape"), [([1, 6], [3, 2]), ([1, -1], [3, 2]), ([1], [3, 2]), ([1, 4], [2**40])])
def test_sparse_tensors_that_nobody_can_make_dense_are_named(places: list[int], shape: list[int]) -> None:
    made, broken = onnx.load_from_string(model([node("Add", ["x", "w"])], [1, 2])), sparse([1, 4])
    del broken.dims[:]
    broken.dims.extend(shape)
    broken.indices.CopyFrom(numpy_helper.from_array(np.array(places)))
    made.graph.sparse_initializer.append(broken)
    with pytest.raises(OnnxError, match="sparse tensor 'w'"):
        parse(made.SerializeToString())


def test_a_sparse_tensor_of_text_is_named() -> None:
    made, text = onnx.load_from_string(model([node("Add", ["x", "w"])], [1, 2])), sparse([1, 4])
    text.values.CopyFrom(helper.make_tensor("w", onnx.TensorProto.STRING, [2], ["a", "b"]))
    made.graph.sparse_initializer.append(text)
    with pytest.raises(OnnxError, match="sparse tensor 'w' holds text; expected numbers"):
        parse(made.SerializeToString())
