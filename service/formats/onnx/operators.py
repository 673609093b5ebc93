"""Lists the operators of ONNX, and beyond it, that can be bounded, and explains refusals of others."""

from __future__ import annotations

from collections.abc import Sequence

_OPERATORS = """
Abs Add And ArgMax ArgMin Asinh Atan Attention AveragePool BatchNormalization Cast Ceil Celu Clip Compress Concat Conv
ConvInteger ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear Div Dropout DynamicQuantizeLinear Einsum
Elu Equal Erf Exp Expand Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool
GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish Identity
InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax LpNormalization
MatMul MatMulInteger Max MaxPool Mean Min Mish Mod Mul Neg Not OneHot Or PRelu Pad Pow QLinearConv QLinearMatMul
QuantizeLinear RMSNormalization RNN Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence Round Scatter
ScatterElements ScatterND Selu Shrink Sigmoid Sign Sin Sinh Slice Softmax Softplus Softsign SpaceToDepth Split
Sqrt Squeeze Sub Sum Swish Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor
Acos Acosh Asin Atanh Hardmax LpPool MeanVarianceNormalization
ai.onnx.ml.ArrayFeatureExtractor ai.onnx.ml.Binarizer ai.onnx.ml.LinearClassifier ai.onnx.ml.LinearRegressor
ai.onnx.ml.Normalizer ai.onnx.ml.Scaler com.microsoft.Attention com.microsoft.BiasGelu com.microsoft.FastGelu
com.microsoft.FusedMatMul com.microsoft.Gelu com.microsoft.MultiHeadAttention com.microsoft.QuickGelu
com.microsoft.SkipLayerNormalization com.microsoft.SkipSimplifiedLayerNormalization
"""
OPERATORS = frozenset(_OPERATORS.split())
"""Operators with a converter in :mod:`service.bounds.onnx`; constants may be computed by any operator."""
_ADVICE = {
    **dict.fromkeys(("NonZero", "Unique"), "it gives as many entries as '{}' has of a kind, which inputs decide"),
    "Mod": "fmod 0 is the remainder of whole numbers; expected fmod 1",
    "ai.onnx.ml.TreeEnsembleClassifier": "trees jump from leaf to leaf, and none are bounded",
    "ai.onnx.ml.TreeEnsembleRegressor": "trees jump from leaf to leaf, and none are bounded",
}
"""Explanations for operators that people meet and that cannot be bounded; ``{}`` is the name of the first input."""


def advice(operator: str, inputs: Sequence[str]) -> str:
    """Return the addition to a refusal of an operator; empty if there is only no rule for it."""
    return f", as {_ADVICE[operator].format(*inputs[:1])}" if operator in _ADVICE and inputs else ""
