"""ONNX models: every converter against onnxruntime, what is refused and how."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from converter_models import IMAGE, MODELS, B
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import slow_but_for
from nets import output_bounds, prepared, samples
from onnx import TensorProto
from onnx_models import dense, model, node

from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.onnx import OnnxModel, load
from service.bounds.onnx.converters import CONVERTERS
from service.bounds.onnx.reading import Runtime, parse
from service.bounds.onnx.stored import store, stored, type_of
from service.formats.onnx import OPERATORS, operator_of


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
    used = {operator_of(each) for data in MODELS.values() for each in onnx.load_from_string(data).graph.node}
    assert set(CONVERTERS) <= used


SOUND = ["Shrink", "Tan", "Einsum of two", "Pad, reflect", "Tile", "Trilu", "Resize, linear", "Resize, cubic", "LRN"]
SOUND += ["AveragePool, ceil_mode", "AveragePool, dilations", "MaxPool, uneven", "ReduceLogSum", "ReduceProd"]
SOUND += ["ConvTranspose to a shape", "GroupNormalization, opset 21", "Split", "GatherND", "Upsample", "half weights"]
SOUND += ["LSTM", "GRU", "ScatterElements, sums", "LayerNormalization with all outputs"]
SOUND += ["Equal", "Xor", "Sign", "QuantizeLinear", "TopK", "TopK of the least", "GridSample", "FusedMatMul"]
SOUND += ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "fused QuickGelu", "Scaler", "LinearRegressor"]
SOUND += ["Normalizer, L1", "Binarizer", "Normalizer, MAX", "LinearClassifier of one score", "BiasGelu", "fused Gelu"]
SOUND += ["CumSum, both", "Einsum, ellipsis", "Einsum, diagonal", "Einsum of three", "LeakyRelu that falls", "OneHot"]
SOUND += ["LeakyRelu that is steeper", "Mod", "LpNormalization", "LpNormalization, L1"]
SOUND += ["ScatterElements, max", "ScatterElements, mul", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"]
SOUND += ["QLinearMatMul", "QLinearConv", "RotaryEmbedding"]
SOUND += ["fused Attention", "fused Attention, causal", "MultiHeadAttention", "Attention", "RMSNormalization", "Swish"]
SOUND += ["values without entries", "Resize, not larger", "Pow with an exponent for each entry", "Conv of a batch"]
SOUND += ["pools and normalisation of a batch", "LSTM of hard gates", "GRU, clipped, of other activations"]
SOUND += ["Acos and Asin", "Acosh and Atanh", "LpPool, 2", "Hardmax", "MeanVarianceNormalization"]
SOUND += [name for name in MODELS if "the places of TopK" in name or name == "ScatterElements at the least"]
SOUND += ["QuantizeLinear of blocks", "a cast to small integers of a clip", "a picture of bytes"]
SOUND += ["ReduceL2, noop_with_empty_axes", "Where, by a condition of more dimensions", "ReduceSum of one number"]
SOUND += ["MatMul of matrices from the left", "Gemm, a bias for each of as many rows as columns"]


@pytest.mark.parametrize(
    "name",
    slow_but_for(
        SOUND,
        "MatMulInteger",
        "OneHot",
        "Einsum of three",
        "ScatterElements, max",
        "Shrink",
        "LRN",
        "GatherND",
        "QuantizeLinear",
        "TopK",
        "Xor",
        "fused Attention, causal",
        "values without entries",
        "Hardmax",
        "Acos and Asin",
        "a picture of bytes",
    ),
)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**31), radius=st.sampled_from([0.0, 0.05, 0.4]))
def test_bounds_hold_what_is_computed_in_float64(name: str, seed: int, radius: float) -> None:
    """Of operators that are put together here, forward alone and with every operator's lines and rows backward."""
    module, network = doubled(name)
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(1, module.features, generator=generator, dtype=torch.float64)
    box = Interval(centre - radius, centre + radius)
    values = module(samples(box, 60, generator).squeeze(1))
    slack = 1e-9 * (1 + values.abs())
    for method in ("ibp", "crown"):
        bounds = output_bounds(network, box, method)
        assert (bounds.lower <= values + slack).all()
        assert (bounds.upper >= values - slack).all()


@cache
def doubled(name: str) -> tuple[OnnxModel, Network]:
    module = load(MODELS[name]).double()
    assert isinstance(module, OnnxModel)
    return module, prepared(module, module.features)


@pytest.mark.parametrize("name", list(MODELS)[::4])
def test_a_model_that_was_stored_is_the_same(tmp_path: Path, name: str) -> None:
    for dtype, whole in ((torch.float32, load(MODELS[name])), (torch.float64, load(MODELS[name]).double())):
        folder = tmp_path / str(dtype)
        store(folder, MODELS[name], dtype)
        assert type_of(folder) is Runtime.of(parse(MODELS[name])).dtype
        x = torch.randn(3, whole.features, generator=torch.Generator().manual_seed(4), dtype=dtype)
        torch.testing.assert_close(stored(folder, dtype)(x), whole(x), rtol=0, atol=0, equal_nan=True)


def test_the_check_on_load_finds_a_wrong_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "service.bounds.onnx.model.CONVERTERS", {**CONVERTERS, "Tanh": lambda call, values, shape: values[0].float}
    )
    with pytest.raises(UnsupportedModelError, match="differs from onnxruntime by"):
        load(MODELS["Tanh"])


def test_where_onnxruntime_saturates_the_refusal_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor where it does; here the products are those that are wrong."""
    wrong = {**CONVERTERS, "QLinearConv": lambda call, values, shape: values[0].float.new_zeros(1, *shape)}
    monkeypatch.setattr("service.bounds.onnx.model.CONVERTERS", wrong)
    with pytest.raises(UnsupportedModelError, match=r"onnxruntime by .*; ONNX QLinearConv .*reduce_range=True.*\.QDQ"):
        load(MODELS["QLinearConv"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no model", "not an ONNX model"),
        (b"", "not an ONNX model"),
        (model([node("Det", ["x"])], IMAGE), r"no rule for ONNX Det \(node 'det_y'\)"),
        (
            model([node("ArgMax", ["x"], "a", axis=1), node("Cast", ["a"], to=1)], [1, 513]),
            "the place in 513: at most 512 comparisons",
        ),
        (model([node("Relu", ["x"])], IMAGE, opset=7), "opset 7: 8 to 24"),
        (model([node("Relu", ["x"])], ["batch", "any", 3]), "only its first length may be open"),
        (model([node("Relu", ["x"])], [3], kind=TensorProto.BOOL), "input 'x' is BOOL"),
        (model([node("Relu", ["c"])], IMAGE, {"c": B}), "output 'y' does not depend on the input"),
        (model([node("Pow", ["c", "x"])], [3], {"c": B - 9}), r"Pow \(node 'pow_y'\): its exponent depends"),
        (model([node("NonZero", ["x"], "n"), node("Cast", ["n"], to=1)], [4]), "as many entries as 'x' has of a kind"),
        (
            model([node("ArgMax", ["x"], "a"), node("Mul", ["a", "a"], "b"), node("Cast", ["b"], to=1)], [1, 4]),
            "'a', that depend on the input; expected a Cast",
        ),
        (model([node("MaxPool", ["x"], ["y", "i"], kernel_shape=[2, 2])], IMAGE), "it gives indices too"),
        (
            model([node("MaxPool", ["x"], kernel_shape=[2], dilations=[4], pads=[1, 1])], [1, 1, 3]),
            "one of its windows holds padding only",
        ),
        (model([node("Cast", ["x"], "i", to=2), node("Cast", ["i"], to=1)], [3]), "integers that wrap around"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load(data)


def test_what_is_checked_at_submit_is_what_there_are_rules_for() -> None:
    assert CONVERTERS.keys() == OPERATORS


def test_weights_of_a_double_model_keep_all_their_bits() -> None:
    module = load(MODELS["double precision"]).double()
    assert module(torch.ones(1, 4, dtype=torch.float64))[0, 0] == np.float64(1) / 3


def test_weights_become_double() -> None:
    module = load(dense([3, 4, 2])).double()
    assert isinstance(module, OnnxModel)
    assert module(torch.zeros(2, 3, dtype=torch.float64)).dtype == torch.float64
