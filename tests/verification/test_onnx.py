"""ONNX models: every converter against onnxruntime, what is refused and how."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from nets import output_bounds, prepared, samples
from onnx import TensorProto, helper
from onnx_models import dense, model, node, weights

from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.onnx import OnnxModel, load
from service.bounds.onnx.converters import CONVERTERS
from service.bounds.onnx.reading import Runtime, parse


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def numbers(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


W, B = weights(3, 2, 3, 3), weights(3)
IMAGE = [1, 2, 6, 6]
PLAIN = [
    "Abs",
    "Cos",
    "Erf",
    "Exp",
    "Floor",
    "Identity",
    "Neg",
    "Relu",
    "Sigmoid",
    "Sin",
    "Tanh",
    "LeakyRelu",
    "Flatten",
    "GlobalAveragePool",
    "Dropout",
    "Atan",
    "Ceil",
    "Celu",
    "Cosh",
    "Elu",
    "GlobalMaxPool",
    "HardSigmoid",
    "HardSwish",
    "LogSoftmax",
    "Round",
    "Selu",
    "Sinh",
    "Softplus",
    "Softsign",
]
REDUCED = ["ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceSumSquare"]
MODELS: dict[str, bytes] = {
    **{name: model([node(name, ["x"])], IMAGE) for name in PLAIN},
    **{name: model([node(name, ["x"], axes=[1, 3], keepdims=0)], IMAGE) for name in REDUCED},
    "Mish": model([node("Mish", ["x"])], IMAGE, opset=18),
    "CumSum": model([node("CumSum", ["x", "axis"])], IMAGE, {"axis": np.array(2)}),
    "InstanceNormalization": model(
        [node("InstanceNormalization", ["x", "s", "b"])], IMAGE, {"s": weights(2), "b": weights(2)}
    ),
    "Gelu": model([node("Gelu", ["x"])], IMAGE, opset=20),
    "Log": model([node("Exp", ["x"], "e"), node("Log", ["e"])], IMAGE),
    "Sqrt": model([node("Abs", ["x"], "e"), node("Sqrt", ["e"])], IMAGE),
    "Reciprocal": model([node("Exp", ["x"], "e"), node("Reciprocal", ["e"])], IMAGE),
    "Add": model([node("Add", ["c", "x"])], IMAGE, {"c": weights(2, 1, 6)}),
    "Sub, broadcast over another rank": model([node("Sub", ["x", "c"])], [1, 4], {"c": weights(2, 3, 4)}),
    "Mul of two": model([node("Tanh", ["x"], "t"), node("Mul", ["x", "t"])], IMAGE),
    "Div": model([node("Exp", ["x"], "e"), node("Div", ["x", "e"], "d"), node("Div", ["d", "c"])], IMAGE,
                 {"c": numbers(3)}),
    "Max": model([node("Neg", ["x"], "n"), node("Max", ["x", "n", "c"])], IMAGE, {"c": numbers(0.1)}),
    "Min": model([node("Min", ["x", "c"])], IMAGE, {"c": numbers(0.1)}),
    "Mean": model([node("Neg", ["x"], "n"), node("Mean", ["x", "n", "x"])], IMAGE),
    "Sum": model([node("Sum", ["x", "x"])], IMAGE),
    "PRelu": model([node("PRelu", ["x", "s"])], IMAGE, {"s": weights(2, 1, 1)}),
    "Clip": model([node("Clip", ["x", "a", "b"])], IMAGE, {"a": np.float32(-0.5), "b": np.float32(0.7)}),
    "Clip by attributes": model([node("Clip", ["x"], min=-0.5, max=0.7)], IMAGE, opset=8),
    "Pow": model([node("Pow", ["x", "e"])], IMAGE, {"e": np.float32(3)}),
    "Where": model([node("Where", ["m", "x", "c"])], IMAGE,
                   {"m": np.arange(6) % 2 == 0, "c": np.float32(2)}),
    "Cast": model([node("Cast", ["x"], to=TensorProto.FLOAT)], IMAGE),
    "MatMul": model([node("MatMul", ["x", "w"])], IMAGE, {"w": weights(6, 3)}),
    "MatMul of a vector": model([node("MatMul", ["x", "w"])], [4], {"w": weights(4, 3)}),
    "MatMul from the left": model([node("MatMul", ["w", "x"])], IMAGE, {"w": weights(3, 6)}),
    "MatMul, a matrix for each channel": model([node("MatMul", ["x", "w"])], IMAGE, {"w": weights(2, 6, 3)}),
    "MatMul of two": model([node("Transpose", ["x"], "t", perm=[0, 1, 3, 2]), node("MatMul", ["x", "t"])], IMAGE),
    "Gemm": model([node("Gemm", ["x", "w", "c"], alpha=0.5, beta=2.0, transA=1)], [1, 4],
                  {"w": weights(1, 3), "c": weights(4, 1)}),
    "Conv": model([node("Conv", ["x", "w", "b"], pads=[1, 1, 1, 1], strides=[2, 1])], IMAGE, {"w": W, "b": B}),
    "Conv, uneven padding": model([node("Conv", ["x", "w"], pads=[0, 1, 2, 0], dilations=[1, 2])], IMAGE, {"w": W}),
    "Conv, SAME_UPPER": model([node("Conv", ["x", "w"], auto_pad="SAME_UPPER", strides=[2, 2])], IMAGE, {"w": W}),
    "Conv of one dimension": model([node("Conv", ["x", "w"], group=2)], [1, 2, 9], {"w": weights(4, 1, 3)}),
    "ConvTranspose": model([node("ConvTranspose", ["x", "w", "b"], strides=[2, 2], pads=[1, 0, 1, 0],
                                 output_padding=[1, 0])], IMAGE, {"w": weights(2, 3, 3, 3), "b": B}),
    "ConvTranspose, uneven": model([node("ConvTranspose", ["x", "w"], strides=[2, 2], pads=[0, 1, 1, 0])], IMAGE,
                                   {"w": weights(2, 3, 3, 3)}),
    "AveragePool": model([node("AveragePool", ["x"], kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 0])], IMAGE),
    "AveragePool that counts": model([node("AveragePool", ["x"], kernel_shape=[3, 3], pads=[1, 1, 1, 1],
                                           count_include_pad=1)], IMAGE),
    "MaxPool": model([node("MaxPool", ["x"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])], IMAGE),
    "BatchNormalization": model([node("BatchNormalization", ["x", "s", "b", "m", "v"])], IMAGE,
                                {"s": weights(2), "b": weights(2), "m": weights(2), "v": np.abs(weights(2)) + 0.1}),
    "LayerNormalization": model([node("LayerNormalization", ["x", "s", "b"], axis=2)], IMAGE,
                                {"s": weights(6, 6), "b": weights(6, 6)}),
    "Softmax": model([node("Softmax", ["x"], axis=1)], IMAGE),
    "Softmax before opset 13": model([node("Softmax", ["x"], axis=2)], IMAGE, opset=11),
    "ReduceMean": model([node("ReduceMean", ["x"], axes=[-1, 1], keepdims=0)], IMAGE),
    "ReduceSum": model([node("ReduceSum", ["x", "a"])], IMAGE, {"a": ints(2)}),
    "Reshape": model([node("Reshape", ["x", "s"])], IMAGE, {"s": ints(1, -1, 4)}),
    "Reshape by shape arithmetic": model(
        [node("Shape", ["x"], "s"), node("Gather", ["s", "zero"], "n"), node("Unsqueeze", ["n"], "u", axes=[0]),
         node("Concat", ["u", "rest"], "t", axis=0), node("Reshape", ["x", "t"])],
        ["batch", 2, 6, 6], {"zero": np.int64(0), "rest": ints(-1)}, opset=11),
    "Squeeze, Unsqueeze": model([node("Squeeze", ["x"], "s", axes=[0]), node("Unsqueeze", ["s"], axes=[1])], IMAGE,
                                opset=11),
    "Transpose of everything": model([node("Transpose", ["x"])], IMAGE),
    "Expand": model([node("Expand", ["x", "s"])], [1, 1, 3], {"s": ints(2, 4, 3)}),
    "Slice": model([node("Slice", ["x", "s", "e", "a", "p"])], IMAGE,
                   {"s": ints(-1, 1), "e": ints(-7, 100), "a": ints(2, 3), "p": ints(-2, 2)}),
    "Slice by attributes": model([node("Slice", ["x"], starts=[1], ends=[-1], axes=[3])], IMAGE, opset=8),
    "Gather": model([node("Gather", ["x", "i"], axis=2)], IMAGE, {"i": np.array([[0, -1], [3, 3]])}),
    "Split": model([node("Split", ["x", "s"], ["p", "q"], axis=3), node("Neg", ["p"], "n"),
                    node("Concat", ["q", "n", "c"], axis=3)], IMAGE, {"s": ints(2, 4), "c": weights(1, 2, 6, 1)}),
    "Split evenly": model([node("Split", ["x"], ["y", "q"], axis=2)], IMAGE, opset=11),
    "Pad": model([node("Pad", ["x", "p", "v"])], IMAGE,
                 {"p": ints(0, 0, 1, 2, 0, 0, 0, 1), "v": np.float32(1.5)}),
    "two outputs": model([node("Neg", ["x"]), node("Exp", ["x"], "z")], [1, 4], outputs=("z", "y")),
    "double precision": model([node("Mul", ["x", "c"])], [1, 4], {"c": np.float64(1) / 3}, kind=TensorProto.DOUBLE),
    "half precision": model([node("Mul", ["x", "c"])], [1, 4], {"c": np.float16(0.25)}, kind=TensorProto.FLOAT16),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_onnxruntime_computes(name: str) -> None:
    """In batches, where onnxruntime takes one instance at a time, on other inputs than the check on load."""
    module = load(MODELS[name])
    runtime = Runtime.of(parse(MODELS[name]))
    x = torch.randn(5, module.features, generator=torch.Generator().manual_seed(9))
    expected = np.stack([runtime.flat(instance) for instance in x.numpy()])
    assert module.outputs == expected.shape[1]
    tolerance = 2e-3 if name == "half precision" else 1e-5
    np.testing.assert_allclose(module(x).numpy(), expected, rtol=tolerance, atol=tolerance)


def test_every_converter_is_covered() -> None:
    used = {each.op_type for data in MODELS.values() for each in onnx.load_from_string(data).graph.node}
    assert set(CONVERTERS) <= used


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "crown"])
def test_bounds_hold_what_onnxruntime_computes(method: str) -> None:
    data = MODELS["Split"]
    module = load(data).double()
    network = prepared(module, module.features)
    generator = torch.Generator().manual_seed(3)
    centre = torch.randn(1, module.features, generator=generator, dtype=torch.float64)
    box = Interval(centre - 0.1, centre + 0.1)
    bounds, runtime = output_bounds(network, box, method), Runtime.of(parse(data))
    for x in samples(box, 10, generator):
        y = torch.from_numpy(runtime.flat(x[0].numpy()))
        assert (bounds.lower <= y + 1e-5).all()
        assert (bounds.upper >= y - 1e-5).all()


def test_the_check_on_load_finds_a_wrong_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "service.bounds.onnx.model.CONVERTERS", {**CONVERTERS, "Tanh": lambda call, values, shape: values[0].float}
    )
    with pytest.raises(UnsupportedModelError, match="differs from onnxruntime by"):
        load(MODELS["Tanh"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no model", "not an ONNX model"),
        (b"", "not an ONNX model"),
        (model([node("Sign", ["x"])], IMAGE), r"ONNX Sign \(node 'sign_y'\): no converter. Supported operators: Abs"),
        (model([node("Relu", ["x"])], IMAGE, opset=7), "opset 7: 8 to 21"),
        (model([node("Relu", ["x"])], ["batch", "any", 3]), "only its first length may be open"),
        (model([node("Relu", ["x"])], [3], kind=TensorProto.INT32), "input 'x' is INT32"),
        (model([node("Relu", ["c"])], IMAGE, {"c": B}), "output 'y' does not depend on the input"),
        (model([node("Pow", ["c", "x"])], [3], {"c": B}), r"Pow \(node 'pow_y'\): its exponent depends"),
        (model([node("Greater", ["x", "c"], "m"), node("Where", ["m", "x", "c"])], [3], {"c": B}), "Greater"),
        (model([node("MaxPool", ["x"], kernel_shape=[2, 2], ceil_mode=1)], IMAGE), "ceil_mode"),
        (model([node("Conv", ["x", "w"])], [2, 2, 6, 6], {"w": W}), "a batch of 2 within one instance"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load(data)


def test_two_inputs_are_refused() -> None:
    proto = onnx.load_from_string(dense([3, 2]))
    proto.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1]))
    with pytest.raises(UnsupportedModelError, match=r"2 inputs \('x', 'z'\); expected one"):
        load(proto.SerializeToString())


def test_weights_become_double() -> None:
    module = load(dense([3, 4, 2])).double()
    assert isinstance(module, OnnxModel)
    assert module(torch.zeros(2, 3, dtype=torch.float64)).dtype == torch.float64
