"""Answers ``IsNaN`` and ``IsInf`` for values that are always finite.

Over the real numbers a value is finite if all operators that lead to it from the inputs and from finite
constants are defined for all finite numbers; roots, logarithms and quotients count if the signs of their inputs
are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from service.formats.onnx_dependence import graphs_in, ordered

_ASKING = frozenset({"IsInf", "IsNaN"})
_DEFINED_NAMES = """
Abs Add And Atan AveragePool Cast Ceil Celu Clip Concat ConstantOfShape Conv ConvTranspose Cos CumSum DepthToSpace
DequantizeLinear Dropout Einsum Elu Equal Erf Expand Flatten Floor Gather GatherElements GatherND Gelu Gemm
GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual GroupNormalization HardSigmoid HardSwish Identity
InstanceNormalization LayerNormalization LeakyRelu Less LessOrEqual LogSoftmax MatMul Max Mean Min Mish Mul Neg Not Or
PRelu Pad RMSNormalization Range ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
ReduceSumSquare Relu Reshape Resize Round ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Size Slice
Softmax Softplus Softsign SpaceToDepth Split Squeeze Sub Sum Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze
Where Xor
"""
_KEEPING_NAMES = """
Add AveragePool Cast Concat Expand Flatten Gather Identity Max Mean Min ReduceMax ReduceMean ReduceMin ReduceSum
Reshape Slice Split Squeeze Sum Tile Transpose Unsqueeze Where
"""
_DEFINED, _KEEPS_SIGN = frozenset(_DEFINED_NAMES.split()), frozenset(_KEEPING_NAMES.split())
_NOT_BELOW_0 = frozenset(
    ["Abs", "HardSigmoid", "ReduceL1", "ReduceL2", "ReduceSumSquare", "Relu", "Sigmoid", "Size", "Softmax", "Softplus"]
)
_FREE, _NOT_NEGATIVE, _POSITIVE = range(3)


@dataclass(frozen=True)
class _KnownValue:
    finite: bool
    sign: int = _FREE


_UNKNOWN = _KnownValue(finite=False)


def without_settled_questions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with false in place of ``IsNaN`` and ``IsInf`` of values that are always finite."""
    if not any(node.op_type in _ASKING for node in model.graph.node):
        return model
    known = {value.name: _KnownValue(finite=True) for value in model.graph.input}
    known |= {tensor.name: _constant(tensor) for tensor in model.graph.initializer}
    arrays = {tensor.name: tensor for tensor in model.graph.initializer}
    for _, node in ordered(model.graph.node):
        found = _found(node, known, arrays)
        known |= dict.fromkeys(filter(None, node.output), found)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        settled = node.op_type in _ASKING and known.get(node.input[0], _UNKNOWN).finite
        model.graph.node.extend(_false(node) if settled else [node])
    return model


def _false(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes that give False in the shape of a node's input."""
    shape, value = f"{node.output[0]}.shape", helper.make_tensor("value", TensorProto.BOOL, [1], [False])
    return [
        helper.make_node("Shape", [node.input[0]], [shape]),
        helper.make_node("ConstantOfShape", [shape], list(node.output), value=value),
    ]


def _constant(tensor: TensorProto) -> _KnownValue:
    try:
        array = numpy_helper.to_array(tensor).astype(np.float64)
    except (TypeError, ValueError, KeyError):
        return _UNKNOWN
    least = float(array.min(initial=np.inf))
    sign = _POSITIVE if least > 0 else _NOT_NEGATIVE if least >= 0 else _FREE
    return _KnownValue(bool(np.isfinite(array).all()), sign)


def _found(node: onnx.NodeProto, known: Mapping[str, _KnownValue], arrays: dict[str, TensorProto]) -> _KnownValue:
    if node.op_type == "Constant":
        tensors = [each.t for each in node.attribute if each.name == "value"]
        if tensors:
            arrays[node.output[0]] = tensors[0]
        return _constant(tensors[0]) if tensors else _UNKNOWN
    given = [known.get(name, _UNKNOWN) for name in node.input if name]
    if node.domain not in ("", "ai.onnx") or any(graphs_in(node)) or not all(each.finite for each in given):
        return _UNKNOWN
    if node.op_type in _PARTLY_DEFINED:
        return _PARTLY_DEFINED[node.op_type](node, given, arrays)
    if node.op_type not in _DEFINED:
        return _UNKNOWN
    return _KnownValue(finite=True, sign=_sign(node, given))


def _sign(node: onnx.NodeProto, given: list[_KnownValue]) -> int:
    kind, signs = node.op_type, [each.sign for each in given]
    if kind in _NOT_BELOW_0 or (kind == "Mul" and node.input[0] == node.input[1]):
        return _NOT_NEGATIVE
    if kind in {"Mul", "MatMul"}:
        return min(_NOT_NEGATIVE, *signs)
    if kind in {"Clip", "Max"}:
        return max(signs[:2]) if kind == "Clip" else max(signs)
    if kind == "Add" and min(signs) >= _NOT_NEGATIVE:
        return max(signs)
    if kind not in _KEEPS_SIGN or not signs:
        return _FREE
    several = kind in {"Add", "Concat", "Mean", "Min", "Sum"}
    return min(signs) if several else min(signs[1:]) if kind == "Where" else signs[0]


def _root(node: onnx.NodeProto, given: list[_KnownValue], arrays: Mapping[str, TensorProto]) -> _KnownValue:
    return given[0] if given[0].sign >= _NOT_NEGATIVE else _UNKNOWN


def _logarithm(node: onnx.NodeProto, given: list[_KnownValue], arrays: Mapping[str, TensorProto]) -> _KnownValue:
    return _KnownValue(finite=True) if given[0].sign == _POSITIVE else _UNKNOWN


def _quotient(node: onnx.NodeProto, given: list[_KnownValue], arrays: Mapping[str, TensorProto]) -> _KnownValue:
    """Return the known facts about a quotient, or about the reciprocal of a single operand."""
    below, above = given[-1], given[0].sign if len(given) > 1 else _POSITIVE
    without_0 = node.input[-1] in arrays and bool(numpy_helper.to_array(arrays[node.input[-1]]).all())
    if below.sign != _POSITIVE and not without_0:
        return _UNKNOWN
    return _KnownValue(finite=True, sign=min(_NOT_NEGATIVE, above) if below.sign == _POSITIVE else _FREE)


def _power(node: onnx.NodeProto, given: list[_KnownValue], arrays: Mapping[str, TensorProto]) -> _KnownValue:
    if node.input[1] not in arrays:
        return _UNKNOWN
    exponents = numpy_helper.to_array(arrays[node.input[1]]).astype(np.float64)
    even, whole = bool((exponents % 2 == 0).all()), bool((exponents % 1 == 0).all())
    if bool((exponents < 0).any()) or not (whole or given[0].sign >= _NOT_NEGATIVE):
        return _UNKNOWN
    return _KnownValue(finite=True, sign=_NOT_NEGATIVE if even or given[0].sign >= _NOT_NEGATIVE else _FREE)


_PARTLY_DEFINED: Mapping[str, Callable[[onnx.NodeProto, list[_KnownValue], Mapping[str, TensorProto]], _KnownValue]] = {
    "Div": _quotient,
    "Log": _logarithm,
    "Pow": _power,
    "Reciprocal": _quotient,
    "Sqrt": _root,
}
