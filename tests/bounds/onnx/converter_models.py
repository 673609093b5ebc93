"""Small ONNX models, one or more of every operator that is read."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto
from onnx_models import model, node, weights


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def numbers(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


W, B = weights(3, 2, 3, 3), weights(3)
IMAGE = [1, 2, 6, 6]

PLAIN = [
    "Abs", "Cos", "Erf", "Exp", "Floor", "Identity", "Neg", "Relu", "Sigmoid", "Sin", "Tanh", "LeakyRelu",
    "Flatten", "GlobalAveragePool", "Dropout", "Asinh", "Atan", "Ceil", "Celu", "Cosh", "Elu", "GlobalMaxPool",
    "HardSigmoid", "HardSwish", "LogSoftmax", "Round", "Selu", "Sinh", "Softplus", "Softsign",
]  # fmt: skip
REDUCED = ["ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceSumSquare"]


def of_bytes() -> bytes:
    """An image of whole numbers from 0 to 255, whose last line divides them."""
    nodes = [node("Cast", ["x"], "c", to=TensorProto.FLOAT), node("Mul", ["c", "f"])]
    made = onnx.load_from_string(model(nodes, [1, 3], {"f": np.float32(1 / 255)}))
    made.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
    data: bytes = made.SerializeToString()
    return data


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
    **{f"{name} before opset 13": model([node(name, ["x"], axis=2)], IMAGE, opset=11)
       for name in ("Softmax", "LogSoftmax", "Hardmax")},
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
    "Clip without a minimum": model([node("Clip", ["x", "", "b"])], IMAGE, {"b": np.float32(0.2)}),
    "Conv without a bias that is named": model([node("Conv", ["x", "w", ""])], IMAGE, {"w": W}),
    "Slice without axes": model([node("Slice", ["x", "s", "e", "", "p"])], IMAGE,
                                {"s": ints(0, 0, 1), "e": ints(1, 2, 6), "p": ints(1, 1, 2)}),
    "LayerNormalization without a bias": model([node("LayerNormalization", ["x", "s", ""])], IMAGE, {"s": weights(6)}),
    "AveragePool, ceil_mode": model([node("AveragePool", ["x"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)],
                                    IMAGE, opset=19),
    "AveragePool, dilations": model([node("AveragePool", ["x"], kernel_shape=[2, 2], dilations=[2, 1],
                                          pads=[1, 1, 0, 1])], IMAGE, opset=19),
    "MaxPool, ceil_mode": model([node("MaxPool", ["x"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)], IMAGE),
    "MaxPool, uneven": model([node("MaxPool", ["x"], kernel_shape=[3, 2], dilations=[1, 2], pads=[0, 1, 2, 0])], IMAGE),
    "MaxPool of three dimensions": model([node("MaxPool", ["x"], kernel_shape=[2, 2, 2])], [1, 2, 3, 4, 2]),
    "ConvTranspose, SAME_LOWER": model([node("ConvTranspose", ["x", "w"], strides=[2, 2], auto_pad="SAME_LOWER")],
                                       IMAGE, {"w": weights(2, 3, 3, 3)}),
    "ConvTranspose to a shape": model([node("ConvTranspose", ["x", "w"], strides=[2, 2], output_shape=[11, 12])],
                                      IMAGE, {"w": weights(2, 3, 3, 3)}),
    "Shrink": model([node("Shrink", ["x"], lambd=0.4, bias=0.4)], IMAGE),
    "Shrink, with jumps": model([node("Shrink", ["x"], lambd=0.5, bias=0.2)], IMAGE),
    "ThresholdedRelu": model([node("ThresholdedRelu", ["x"], alpha=0.7)], IMAGE),
    "Tan": model([node("Tanh", ["x"], "t"), node("Tan", ["t"])], IMAGE),
    "Einsum": model([node("Einsum", ["x", "w"], equation="bchw,wk->bhkc")], IMAGE, {"w": weights(6, 3)}),
    "Einsum of two": model([node("Tanh", ["x"], "t"), node("Einsum", ["x", "t"], equation="bchw,bckw->bchk")], IMAGE),
    "Einsum of a constant": model([node("Einsum", ["w", "x"], equation="wkc,bchw->kbh")], IMAGE,
                                  {"w": weights(6, 3, 2)}),
    "Einsum of one": model([node("Einsum", ["x"], equation="bchw->whb")], IMAGE),
    "Pad, reflect": model([node("Pad", ["x", "p"], mode="reflect")], IMAGE, {"p": ints(0, 0, 2, 1, 0, 0, 1, 3)}),
    "Pad, edge": model([node("Pad", ["x", "p"], mode="edge")], IMAGE, {"p": ints(0, 1, 2, 1, 0, 0, 1, 3)}),
    "Pad by attributes": model([node("Pad", ["x"], pads=[0, 0, 1, 2, 0, 0, 0, 1], value=0.5)], IMAGE, opset=10),
    "Tile": model([node("Tile", ["x", "r"])], IMAGE, {"r": ints(1, 2, 1, 3)}),
    "DepthToSpace": model([node("DepthToSpace", ["x"], blocksize=2, mode="CRD")], [1, 8, 2, 3]),
    "SpaceToDepth": model([node("SpaceToDepth", ["x"], blocksize=2)], IMAGE),
    "GatherElements": model([node("GatherElements", ["x", "i"], axis=3)], IMAGE,
                            {"i": np.arange(24).reshape(1, 2, 6, 2) % 6}),
    "GatherND": model([node("GatherND", ["x", "i"])], IMAGE, {"i": np.array([[0, 1, 2], [0, 0, 5]])}),
    **{f"{name}, noop_with_empty_axes": model([node(name, ["x"], noop_with_empty_axes=1)], IMAGE, opset=18)
       for name in ("ReduceL1", "ReduceL2", "ReduceMean", "ReduceSumSquare", "ReduceLogSumExp")},
    "Resize, not larger": model([node("Resize", ["x", "", "", "s"], mode="linear", axes=[2, 3],
                                      keep_aspect_ratio_policy="not_larger")], IMAGE, {"s": ints(9, 20)}, opset=18),
    "Resize, not smaller": model([node("Resize", ["x", "", "", "s"], axes=[3, 2],
                                       keep_aspect_ratio_policy="not_smaller")], [1, 2, 5, 7], {"s": ints(9, 4)},
                                 opset=18),
    "Pow with an exponent for each entry": model(
        [node("Abs", ["x"], "a"), node("Pow", ["a", "e"])], IMAGE, {"e": numbers(2, 1, 0.5, 3, 2, 0)}),
    "Conv of a batch": model([node("Conv", ["x", "w", "b"], pads=[1, 1, 1, 1])], [2, 2, 6, 6], {"w": W, "b": B}),
    "ConvTranspose of a batch": model([node("ConvTranspose", ["x", "w", "b"], strides=[2, 2])], [3, 2, 4, 4],
                                      {"w": weights(2, 3, 3, 3), "b": B}),
    "pools and normalisation of a batch": model(
        [node("MaxPool", ["x"], "p", kernel_shape=[2, 2], pads=[0, 0, 1, 1]), node("AveragePool", ["p"], "q",
         kernel_shape=[2, 2]), node("InstanceNormalization", ["q", "s", "b"])], [2, 2, 6, 6],
        {"s": weights(2), "b": weights(2)}),
    "LSTM of hard gates": model(
        [node("LSTM", ["x", "w", "r", "b"], ["y", "h"], hidden_size=2, clip=0.3, activation_alpha=[0.3],
              activation_beta=[0.4], activations=["HardSigmoid", "Tanh", "Tanh"])], [3, 1, 3],
        {"w": 3 * weights(1, 8, 3), "r": weights(1, 8, 2), "b": weights(1, 16)}),
    "GRU, clipped, of other activations": model(
        [node("GRU", ["x", "w", "r"], ["y", "h"], hidden_size=2, clip=0.7, direction="bidirectional",
              activations=["HardSigmoid", "Softsign", "Sigmoid", "LeakyRelu"])], [3, 1, 3],
        {"w": 3 * weights(2, 6, 3), "r": weights(2, 6, 2)}),
    "Acos and Asin": model(
        [node("Sin", ["x"], "t"), node("Mul", ["t", "w"], "s"), node("Asin", ["s"], "a"), node("Acos", ["s"], "b"),
         node("Mul", ["b", "c"], "d"), node("Add", ["a", "d"])], [1, 4], {"c": np.float32(0.5), "w": np.float32(0.9)}),
    "Acosh and Atanh": model([node("Tanh", ["x"], "t"), node("Atanh", ["t"], "a"), node("Cosh", ["x"], "c"),
                              node("Acosh", ["c"], "b"), node("Add", ["a", "b"])], [1, 4]),
    **{f"LpPool, {p}": model([node("LpPool", ["x"], kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 0], p=p)],
                             IMAGE, opset=18) for p in (1, 2, 3)},
    "Hardmax": model([node("Hardmax", ["x"], axis=2)], IMAGE),
    "MeanVarianceNormalization": model([node("MeanVarianceNormalization", ["x"])], IMAGE),
    "QuantizeLinear of blocks": model(
        [node("QuantizeLinear", ["x", "s", "z"], "q", axis=1, block_size=2),
         node("DequantizeLinear", ["q", "s", "z"], axis=1, block_size=2)], [2, 5],
        {"s": np.float32([[0.05, 0.1, 0.03]] * 2), "z": np.uint8([[3, 120, 128]] * 2)}, opset=21),
    "a cast to small integers of a clip": model(
        [node("Clip", ["x", "a", "b"], "c"), node("Cast", ["c"], "i", to=TensorProto.INT8), node("Cast", ["i"], to=1)],
        [1, 4], {"a": np.float32(-1.5), "b": np.float32(100)}),
    "a picture of bytes": of_bytes(),
    "values without entries": model(
        [node("Slice", ["x", "s", "s", "a"], "e"), node("Relu", ["e"], "r"), node("Mul", ["r", "e"], "m"),
         node("Floor", ["m"], "f"), node("MatMul", ["f", "w"], "g"), node("ReduceSum", ["e"], "t", keepdims=1),
         node("Concat", ["x", "f"], "c", axis=1), node("Add", ["c", "t"], "d"), node("Add", ["d", "g"])],
        [1, 3], {"s": ints(1), "a": ints(1), "w": weights(0, 3)}),
    "DynamicQuantizeLinear of one number": model(
        [node("ReduceSum", ["x"], "t", keepdims=0), node("DynamicQuantizeLinear", ["t"], ["q", "s", "z"]),
         node("DequantizeLinear", ["q", "s", "z"])], [1, 3]),
    "Compress": model([node("Compress", ["x", "c"], axis=2)], IMAGE, {"c": np.arange(6) % 2 == 0}),
    "ReverseSequence": model([node("ReverseSequence", ["x", "l"], time_axis=1, batch_axis=0)], [1, 5, 2],
                             {"l": ints(4)}),
    "Trilu": model([node("Trilu", ["x"], upper=0)], IMAGE),
    "Resize, nearest": model([node("Resize", ["x", "", "s"], mode="nearest")], IMAGE, {"s": numbers(1, 1, 2, 1.5)}),
    "Resize, linear": model([node("Resize", ["x", "", "", "s"], mode="linear",
                                  coordinate_transformation_mode="align_corners")], IMAGE, {"s": ints(1, 2, 9, 4)}),
    "Resize to sizes, opset 11": model([node("Resize", ["x", "e", "e", "s"])], IMAGE,
                                       {"e": numbers(), "s": ints(1, 2, 3, 4)}, opset=11),
    "Resize of some axes": model([node("Resize", ["x", "", "s"], axes=[3, 2], mode="linear")], IMAGE,
                                 {"s": numbers(2, 0.5)}, opset=18),
    "Resize, cubic": model([node("Resize", ["x", "", "s"], mode="cubic")], IMAGE, {"s": numbers(1, 1, 2, 2)}),
    "Resize, opset 10": model([node("Resize", ["x", "s"])], IMAGE, {"s": numbers(1, 1, 2, 0.5)}, opset=10),
    "Upsample": model([node("Upsample", ["x", "s"], mode="linear")], IMAGE, {"s": numbers(1, 1, 2, 3)}, opset=9),
    "Upsample by attributes": model([node("Upsample", ["x"], scales=[1.0, 1.0, 2.0, 3.0])], IMAGE, opset=8),
    "ReduceLogSum": model([node("Exp", ["x"], "e"), node("ReduceLogSum", ["e"], axes=[3])], IMAGE),
    "ReduceProd": model([node("ReduceProd", ["x"], axes=[1, 3], keepdims=0)], [1, 2, 3, 2]),
    "GroupNormalization": model([node("GroupNormalization", ["x", "s", "b"], num_groups=2)], [1, 4, 3, 3],
                                {"s": weights(2), "b": weights(2)}, opset=18),
    "GroupNormalization, opset 21": model([node("GroupNormalization", ["x", "s", "b"], num_groups=2)], [1, 4, 3, 3],
                                          {"s": weights(4), "b": weights(4)}, opset=21),
    "LRN": model([node("LRN", ["x"], size=3, alpha=0.5, bias=1.5)], [1, 5, 2, 2]),
    "bfloat16 weights": model([node("Cast", ["c"], "f", to=TensorProto.FLOAT), node("Mul", ["x", "f"])], [1, 2],
                              {"c": numbers(0.5, -3).astype(ml_dtypes.bfloat16)}),
    "half weights": model([node("Cast", ["c"], "f", to=TensorProto.FLOAT), node("Mul", ["x", "f"])], [1, 2],
                          {"c": np.array([0.5, -3], dtype=np.float16)}),
    "MaxPool, pads as wide as the kernel allows": model(
        [node("MaxPool", ["x"], kernel_shape=[3, 3], pads=[2, 2, 2, 2])], IMAGE),
    "LayerNormalization with all outputs": model(
        [node("LayerNormalization", ["x", "s"], ["y", "m", "d"])], IMAGE, {"s": weights(6)},
        outputs=("y", "m", "d")),
    "RNN": model([node("RNN", ["x", "w", "r"], activations=["Relu"], hidden_size=2)], [4, 1, 3],
                 {"w": weights(1, 2, 3), "r": weights(1, 2, 2)}),
    "LSTM": model([node("LSTM", ["x", "w", "r", "b"], ["", "y", "c"], hidden_size=2)], [4, 1, 3],
                  {"w": weights(1, 8, 3), "r": weights(1, 8, 2), "b": weights(1, 16)}, outputs=("y", "c")),
    "LSTM, both ways, from a state": model(
        [node("LSTM", ["x", "w", "r", "", "", "h", "c"], hidden_size=2, direction="bidirectional")], [3, 1, 3],
        {"w": weights(2, 8, 3), "r": weights(2, 8, 2), "h": weights(2, 1, 2), "c": weights(2, 1, 2)}),
    "GRU": model([node("GRU", ["x", "w", "r", "b"], ["y", "h"], hidden_size=2, linear_before_reset=1,
                       direction="reverse")], [3, 1, 3],
                 {"w": weights(1, 6, 3), "r": weights(1, 6, 2), "b": weights(1, 12)}, outputs=("y", "h")),
    "GRU that resets first": model(
        [node("GRU", ["x", "w", "r", "b"], ["y", "h"], hidden_size=2)], [3, 1, 3],
        {"w": weights(1, 6, 3), "r": weights(1, 6, 2), "b": weights(1, 12)}, outputs=("y", "h")),
    "ScatterElements": model([node("ScatterElements", ["x", "i", "u"], axis=1)], [2, 4],
                             {"i": np.array([[0, -1], [2, 1]]), "u": weights(2, 2)}),
    "ScatterElements, sums": model([node("ScatterElements", ["c", "i", "x"], axis=0, reduction="add")], [3, 2],
                                   {"c": weights(4, 2), "i": np.array([[0, 3], [0, 1], [0, 3]])}, opset=16),
    "ScatterND": model([node("ScatterND", ["x", "i", "u"])], [3, 2], {"i": np.array([[2], [0]]), "u": weights(2, 2)}),
    **{kind: model([node(kind, ["x", "c"], "t"), node("Where", ["t", "x", "c"])], IMAGE, {"c": weights(6, 6)})
       for kind in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")},
    **{kind: model([node("Less", ["x", "c"], "t"), node("Less", ["x", "d"], "u"), node("Not", ["u"], "n"),
                    node(kind, ["t", "n"], "b"), node("Cast", ["b"], to=TensorProto.FLOAT)], [1, 4],
                   {"c": numbers(0.7), "d": numbers(-0.2)}) for kind in ("And", "Or", "Xor")},
    "Sign": model([node("Sign", ["x"])], IMAGE),
    **{kind: model([node("Log", ["x"], "l"), node(kind, ["l"], "t"), node("Where", ["t", "c", "x"])], IMAGE,
                   {"c": weights(6, 6)}) for kind in ("IsInf", "IsNaN")},
    "QuantizeLinear": model([node("QuantizeLinear", ["x", "s", "z"], "q"), node("DequantizeLinear", ["q", "s", "z"])],
                            IMAGE, {"s": np.float32(0.02), "z": np.uint8(120)}),
    "DequantizeLinear, along channels": model(
        [node("QuantizeLinear", ["x", "s", "z"], "q"), node("DequantizeLinear", ["q", "s", "z"])], IMAGE,
        {"s": numbers(0.02, 0.3), "z": np.array([3, -5], np.int8)}),
    **{kind: model([node(kind, ["x"], "t", axis=-1), node("Cast", ["t"], to=TensorProto.FLOAT)], [1, 5])
       for kind in ("ArgMax", "ArgMin")},
    "ArrayFeatureExtractor": model(
        [node("ArgMax", ["x"], "t", axis=-1, keepdims=0),
         node("ArrayFeatureExtractor", ["c", "t"], domain="ai.onnx.ml")], [1, 3], {"c": numbers(2, 5, 7)}),
    "TopK": model([node("TopK", ["x", "k"], ["y", "i"])], [1, 5], {"k": ints(3)}),
    "TopK of the least": model([node("TopK", ["x", "k"], ["y", "i"], axis=1, largest=0)], [1, 4, 2], {"k": ints(2)}),
    **{f"{kind} at the places of TopK": model(
        [node("MatMul", ["x", "w"], "l"), node("TopK", ["l", "k"], ["v", "i"]), node("Softmax", ["v"], "p", axis=1),
         each], [2, 3], {"w": weights(3, 4), "k": ints(2), "z": np.full((2, 4), 0.5, np.float32)}, opset=18)
       for kind, each in {
           "ScatterElements": node("ScatterElements", ["z", "i", "p"], axis=1),
           "ScatterElements, sums,": node("ScatterElements", ["l", "i", "p"], axis=-1, reduction="add"),
           "Gather": node("Gather", ["l", "i"], axis=1),
           "GatherElements": node("GatherElements", ["l", "i"], axis=1)}.items()},
    "ScatterElements at the least": model(
        [node("TopK", ["x", "k"], ["v", "i"], axis=0, largest=0), node("ScatterElements", ["x", "i", "c"], axis=0)],
        [4, 2], {"k": ints(2), "c": weights(2, 2)}, opset=18),
    "OneHot of the places of TopK": model(
        [node("TopK", ["x", "k"], ["v", "i"]), node("OneHot", ["i", "d", "p"])], [1, 4],
        {"k": ints(2), "d": np.array(4), "p": numbers(-1, 3)}),
    "GridSample": model([node("GridSample", ["x", "g"], padding_mode="border")], IMAGE, {"g": weights(1, 4, 3, 2)}),
    **{f"fused {kind}": model([node(kind, ["x"], domain="com.microsoft")], IMAGE)
       for kind in ("Gelu", "FastGelu", "QuickGelu")},
    "BiasGelu": model([node("BiasGelu", ["x", "b"], domain="com.microsoft")], [1, 3, 4], {"b": weights(4)}),
    "FusedMatMul": model([node("FusedMatMul", ["x", "w"], domain="com.microsoft", alpha=0.5, transB=1)], [1, 3, 4],
                         {"w": weights(5, 4)}),
    "SkipLayerNormalization": model(
        [node("Tanh", ["x"], "t"), node("SkipLayerNormalization", ["x", "t", "g", "b", "c"], ["n", "", "", "s"],
                                        domain="com.microsoft", epsilon=1e-3), node("Add", ["n", "s"])], [1, 3, 4],
        {"g": weights(4), "b": weights(4), "c": weights(4)}),
    "SkipSimplifiedLayerNormalization": model(
        [node("SkipSimplifiedLayerNormalization", ["x", "x", "g"], domain="com.microsoft", epsilon=1e-3)], [1, 3, 4],
        {"g": weights(4)}),
    "Scaler": model([node("Scaler", ["x"], domain="ai.onnx.ml", offset=[0.5, 1.0], scale=[2.0, 0.1])], [1, 2]),
    "LinearRegressor": model([node("LinearRegressor", ["x"], domain="ai.onnx.ml", coefficients=[0.5, 1.0, 2.0, -1.0],
                                   intercepts=[0.25, 3.0], targets=2)], [1, 2]),
    "LinearClassifier": model(
        [node("LinearClassifier", ["x"], ["label", "y"], domain="ai.onnx.ml", post_transform="SOFTMAX",
              coefficients=[0.5, 1.0, 2.0, -1.0, 0.0, 1.0], intercepts=[0.25, 3.0, 1.0],
              classlabels_strings=["a", "b", "c"])], [1, 2],
        outputs=("label", "y")),
    "Normalizer": model([node("Normalizer", ["x"], domain="ai.onnx.ml", norm="L2")], [1, 3]),
    "LinearClassifier of one score": model(
        [node("LinearClassifier", ["x"], ["label", "y"], domain="ai.onnx.ml", post_transform="LOGISTIC",
              coefficients=[0.5, 1.0], intercepts=[0.25], classlabels_ints=[0, 1])], [1, 2], outputs=("label", "y")),
    "Normalizer, MAX": model([node("Exp", ["x"], "e"), node("Normalizer", ["e"], domain="ai.onnx.ml", norm="MAX")],
                             [1, 3]),
    "fused Attention": model(
        [node("Attention", ["x", "w", "b", "m", "", "r"], domain="com.microsoft", num_heads=2)], [1, 3, 4],
        {"w": weights(4, 12), "b": weights(12), "m": np.array([[1, 1, 0]], np.int32), "r": weights(1, 2, 3, 3)}),
    "fused Attention, causal": model(
        [node("Attention", ["x", "w", "b"], domain="com.microsoft", num_heads=2, unidirectional=1, scale=0.3)],
        [1, 3, 4], {"w": weights(4, 12), "b": weights(12)}),
    "MultiHeadAttention": model(
        [node("Tanh", ["x"], "t"), node("MultiHeadAttention", ["x", "t", "x", "b", "m", "r"], domain="com.microsoft",
                                        num_heads=2)], [1, 3, 4],
        {"b": weights(12), "m": np.array([[1, 0, 1]], np.int32), "r": weights(1, 2, 3, 3)}),
    "Attention": model(
        [node("Tanh", ["x"], "t"), node("Attention", ["t", "x", "x", "m"], q_num_heads=2, kv_num_heads=2)], [1, 3, 4],
        {"m": np.array([[True, True, False], [True] * 3, [False, True, True]])}, opset=23),
    "Attention of constant queries": model(
        [node("Attention", ["q", "x", "x"], q_num_heads=2, kv_num_heads=2)], [1, 3, 4], {"q": weights(1, 2, 4)},
        opset=23),
    "MultiHeadAttention to constants": model(
        [node("MultiHeadAttention", ["x", "k", "k"], domain="com.microsoft", num_heads=2)], [1, 3, 4],
        {"k": weights(1, 5, 4)}),
    "Attention, causal, of shared heads": model(
        [node("Reshape", ["x", "h"], "q"), node("Slice", ["q", "0", "1", "1"], "k"),
         node("Attention", ["q", "k", "k"], is_causal=1, scale=0.7)], [1, 3, 4],
        {"h": np.array([1, 2, 3, 2]), "0": np.array([0]), "1": np.array([1])}, opset=23),
    "RMSNormalization": model([node("RMSNormalization", ["x", "g"], epsilon=1e-3)], [1, 3, 4], {"g": weights(4)},
                              opset=23),
    "Swish": model([node("Swish", ["x"], alpha=1.3)], [1, 4], opset=24),
    "Normalizer, L1": model([node("Normalizer", ["x"], domain="ai.onnx.ml", norm="L1")], [1, 3]),
    "Binarizer": model([node("Binarizer", ["x"], domain="ai.onnx.ml", threshold=0.3)], [1, 3]),
    **{name: model([node("CumSum", ["x", "axis"], **given)], IMAGE, {"axis": np.array(2)})
       for name, given in {"CumSum, exclusive": {"exclusive": 1}, "CumSum, reverse": {"reverse": 1},
                           "CumSum, both": {"exclusive": 1, "reverse": 1}}.items()},
    "Einsum, ellipsis": model([node("Einsum", ["w", "x"], equation="wk,...w")], IMAGE, {"w": weights(6, 3)}),
    "Einsum, diagonal": model([node("Einsum", ["x"], equation="bchh->bch")], IMAGE),
    "Einsum of three": model([node("Tanh", ["x"], "t"), node("Einsum", ["x", "t", "w"], equation="bchw,bckw,kd->bhd")],
                             IMAGE, {"w": weights(6, 3)}),
    "LeakyRelu that falls": model([node("LeakyRelu", ["x"], alpha=-0.3)], IMAGE),
    "LeakyRelu that is steeper": model([node("LeakyRelu", ["x"], alpha=1.7)], IMAGE),
    "Mod": model([node("Mod", ["x", "c"], fmod=1)], IMAGE, {"c": numbers(0.7)}),
    "LpNormalization": model([node("LpNormalization", ["x"], axis=2)], IMAGE),
    "LpNormalization, L1": model([node("LpNormalization", ["x"], p=1)], IMAGE),
    "OneHot": model([node("ArgMax", ["x"], "i", axis=1, keepdims=0), node("OneHot", ["i", "d", "v"], axis=1)], [1, 4],
                    {"d": np.array(5), "v": numbers(-1, 2.5)}),
    "Scatter": model([node("Scatter", ["x", "i", "u"], axis=1)], [2, 4],
                     {"i": np.array([[0, 3], [2, 1]]), "u": weights(2, 2)}, opset=10),
    **{f"ScatterElements, {each}": model(
        [node("Tanh", ["x"], "t"), node("ScatterElements", ["x", "i", "t"], axis=1, reduction=each)], [1, 5],
        {"i": np.array([[0, 3, 0, 1, 0]])}, opset=18) for each in ("max", "min", "mul")},
    "GridSample, nearest": model([node("GridSample", ["x", "g"], mode="nearest")], IMAGE, {"g": weights(1, 4, 3, 2)},
                                 opset=20),
    "CastLike": model([node("CastLike", ["x", "c"], "d"), node("CastLike", ["d", "x"])], IMAGE,
                      {"c": np.zeros(1)}, opset=19),
    "CenterCropPad": model([node("CenterCropPad", ["x", "s"], axes=[2, 3])], IMAGE, {"s": ints(4, 8)}, opset=18),
    "RotaryEmbedding": model([node("RotaryEmbedding", ["x", "c", "s"])], [1, 2, 3, 4],
                             {"c": weights(1, 3, 2), "s": weights(1, 3, 2)}, opset=23),
    "DynamicQuantizeLinear": model(
        [node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), node("DequantizeLinear", ["q", "s", "z"])], [1, 6]),
    "MatMulInteger": model(
        [node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), node("MatMulInteger", ["q", "w", "z", "v"], "i"),
         node("Cast", ["i"], "f", to=TensorProto.FLOAT), node("Mul", ["f", "s"])], [2, 3],
        {"w": np.array([[3, -40], [7, 30], [-27, 5]], np.int8), "v": np.array([0, 3], np.int8)}),
    "ConvInteger": model(
        [node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
         node("ConvInteger", ["q", "w", "z"], "i", pads=[1, 0, 1, 0]),
         node("Cast", ["i"], "f", to=TensorProto.FLOAT), node("Mul", ["f", "s"])], [1, 2, 3, 3],
        {"w": (30 * weights(3, 2, 3, 3)).astype(np.int8)}),
    "QLinearMatMul": model(
        [node("QuantizeLinear", ["x", "s", "z"], "q"),
         node("QLinearMatMul", ["q", "s", "z", "w", "t", "v", "s2", "z"], "p"),
         node("DequantizeLinear", ["p", "s2", "z"])], [2, 3],
        {"s": np.float32(0.02), "z": np.uint8(120), "w": np.array([[3, 200], [7, 90], [127, 5]], np.uint8),
         "t": np.float32(0.01), "v": np.uint8(100), "s2": np.float32(0.05)}),
    "QLinearConv": model(
        [node("QuantizeLinear", ["x", "s", "z"], "q"),
         node("QLinearConv", ["q", "s", "z", "w", "t", "v", "s2", "z", "b"], "p", strides=[2, 1]),
         node("DequantizeLinear", ["p", "s2", "z"])], IMAGE,
        {"s": np.float32(0.02), "z": np.uint8(120), "w": (30 * weights(3, 2, 3, 3)).astype(np.int8),
         "t": numbers(0.01, 0.02, 0.03), "v": np.zeros(3, np.int8), "s2": np.float32(0.05),
         "b": np.array([10, -200, 3], np.int32)}),
    "two outputs": model([node("Neg", ["x"]), node("Exp", ["x"], "z")], [1, 4], outputs=("z", "y")),
    "double precision": model([node("Mul", ["x", "c"])], [1, 4], {"c": np.float64(1) / 3}, kind=TensorProto.DOUBLE),
    "half precision": model([node("Mul", ["x", "c"])], [1, 4], {"c": np.float16(0.25)}, kind=TensorProto.FLOAT16),
    "Where, by a condition of more dimensions": model(
        [node("Where", ["m", "x", "c"])], [2], {"m": np.arange(6).reshape(3, 2) % 3 == 0, "c": weights(2)}),
    "MatMul of matrices from the left": model([node("MatMul", ["w", "x"])], [4, 5], {"w": weights(3, 2, 4)}),
    "Gemm, a bias for each of as many rows as columns": model(
        [node("Gemm", ["x", "w", "c"])], [2, 3], {"w": weights(3, 2), "c": weights(2, 1)}),
    "Gemm without a bias that is named": model([node("Gemm", ["x", "w", ""])], [2, 3], {"w": weights(3, 2)}),
    "ReduceSum of one number": model(
        [node("ReduceSum", ["x"], "s", keepdims=0), node("ReduceSum", ["s"], keepdims=0)], [4]),
}  # fmt: skip
