"""Float8 layers: the arithmetic of scales, bounds of the error, which layers are switched and where that is refused.

Products run on the CPU's float8 kernel, whose sums are exact to float32; a GPU's are in ``test_cuda_layers``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from service.jobs.spec.arithmetic import PrecisionSpec
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.model import ConvnetConfig, TransformerConfig
from service.models import build
from service.models.parallelize import ModelRecipe, parallelize
from service.parallel import mesh
from service.parallel.tensor import ColumnParallelLinear, RowParallelLinear, float8, joint
from service.parallel.tensor.float8 import GRADIENT, OPERAND, Float8Error, apply_float8, float8_linear, scaled

TRANSFORMER = TransformerConfig(vocab_size=32, dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=96, max_sequence=16)
ROUNDING = {OPERAND: (2**-4, 2**-10), GRADIENT: (2**-3, 2**-17)}
"""Half a unit in the last place: relative where numbers are normal, absolute below."""
EXTREMES = [math.inf, -math.inf, math.nan]


def runs_here() -> bool:
    one = scaled(torch.ones(16, 16), OPERAND)
    try:
        float8.product(one, (one[0].t(), one[1]), torch.float32)
    except (RuntimeError, NotImplementedError):
        return False
    return True


needs_products = pytest.mark.skipif(not runs_here(), reason="this version of torch has no float8 products on the CPU")


@contextmanager
def pretended(capability: tuple[int, int]) -> Iterator[None]:
    """Parameters that say they are on a GPU of that capability."""

    def on_a_gpu(weight: Tensor) -> SimpleNamespace:
        return SimpleNamespace(device=torch.device("cuda"), shape=weight.shape)

    with (
        patch.object(float8, "local", on_a_gpu),
        patch("torch.cuda.get_device_capability", return_value=capability),
        patch("torch.cuda.get_device_name", return_value="Some GPU"),
    ):
        yield


def restored(x: tuple[Tensor, Tensor]) -> Tensor:
    return x[0].double() * x[1].double()


def rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of each element of ``x`` in float8; the scale's own rounding is in the last factor."""
    relative, absolute = ROUNDING[dtype]
    scale = x.abs().max().clamp(min=1e-12) / torch.finfo(dtype).max
    return torch.maximum(x.abs() * relative, scale * absolute) * (1 + 1e-6)


def product_error(a: Tensor, b: Tensor, first: torch.dtype, second: torch.dtype) -> Tensor:
    """A bound of the error of each element of ``a · b`` with rounded factors; the last summand is for float32 sums."""
    ea, eb = rounding(a, first), rounding(b, second)
    exact = a.abs() @ b.abs()
    return ea @ b.abs() + a.abs() @ eb + ea @ eb + 1e-5 * exact


@pytest.mark.parametrize("dtype", [OPERAND, GRADIENT])
@settings(deadline=None)
@given(exponent=st.integers(-30, 110), spread=st.integers(0, 30), seed=st.integers(0, 1000))
def test_the_largest_magnitude_is_the_largest_of_the_type(
    dtype: torch.dtype, exponent: int, spread: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(6, 7, generator=generator) * spread
    x = torch.randn(6, 7, generator=generator) * 2.0 ** (exponent - sizes)
    found, scale = scaled(x, dtype)
    assert (found.dtype, scale.dtype, scale.shape) == (dtype, torch.float32, ())
    assert found.double().abs().max() == torch.finfo(dtype).max
    wide = x.double()
    assert bool(((restored((found, scale)) - wide).abs() <= rounding(wide, dtype)).all())


@pytest.mark.parametrize("dtype", [OPERAND, GRADIENT])
def test_zeros_and_what_is_next_to_them_stay_finite(dtype: torch.dtype) -> None:
    for value in (0.0, -0.0, 1e-45, 1e-30):
        found, scale = scaled(torch.full((3, 4), value), dtype)
        assert bool(found.float().isfinite().all())
        assert scale.isfinite()
        assert scale > 0
        assert restored((found, scale)).abs().max() <= 2 * abs(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_magnitudes_next_to_infinity_stay_finite(dtype: torch.dtype) -> None:
    found, scale = scaled(torch.tensor([[torch.finfo(dtype).max, 1.0]], dtype=dtype), OPERAND)
    assert restored((found, scale))[0, 0].item() == pytest.approx(torch.finfo(dtype).max, rel=1e-6)


def test_the_result_is_row_major() -> None:
    assert scaled(torch.randn(4, 6).t(), OPERAND)[0].stride() == (4, 1)


@needs_products
@pytest.mark.parametrize("bad", EXTREMES)
@pytest.mark.parametrize("where", ["x", "weight", "gradient"])
def test_what_is_not_finite_never_becomes_finite(bad: float, where: str) -> None:
    """The job's check of losses and gradients must see it."""
    tensors = {"x": torch.randn(16, 32), "weight": torch.randn(16, 32), "gradient": torch.randn(16, 16)}
    tensors[where][3, 5] = bad
    x, weight = (tensors[name].requires_grad_() for name in ("x", "weight"))
    y = float8_linear(x, weight, None)
    y.backward(tensors["gradient"])
    if where != "gradient":
        assert not bool(y.isfinite().all())
    seen = {"x": [weight], "weight": [x], "gradient": [x, weight]}[where]
    assert not any(bool(leaf.grad.isfinite().all()) for leaf in seen)


@needs_products
@pytest.mark.parametrize("spread", [0, 8])
def test_errors_are_those_of_rounded_factors(spread: int) -> None:
    """Forward and both gradients, each element within the bound of its own sum; and rounded they are."""
    generator = torch.Generator().manual_seed(0)

    def sample(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 2.0 ** (-spread * torch.rand(shape, generator=generator))

    x, weight, gradient = sample(4, 12, 64).requires_grad_(), sample(32, 64).requires_grad_(), sample(4, 12, 32)
    bias = sample(32)
    y = float8_linear(x, weight, bias)
    y.backward(gradient)
    assert y.shape == (4, 12, 32)
    rows, matrix, outer = (each.detach().double() for each in (x.flatten(0, 1), weight, gradient.flatten(0, 1)))
    for found, left, right, types in (
        ((y - bias).flatten(0, 1), rows, matrix.t(), (OPERAND, OPERAND)),
        (x.grad.flatten(0, 1), outer, matrix, (GRADIENT, OPERAND)),
        (weight.grad, outer.t(), rows, (GRADIENT, OPERAND)),
    ):
        error = (found.detach().double() - left @ right).abs()
        assert bool((error <= product_error(left, right, *types)).all())
        assert error.max() > 1e-3 * (left @ right).abs().max()
        # Errors are independent, so most are far below the bound.
        assert error.mean() < 0.06 * (left @ right).std()


@needs_products
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_types_stay_and_only_what_is_wanted_is_computed(dtype: torch.dtype) -> None:
    x, weight = torch.randn(16, 32, dtype=dtype), torch.randn(16, 32, dtype=dtype, requires_grad=True)
    y = float8_linear(x, weight, torch.ones(16, dtype=dtype))
    with patch.object(float8, "product", wraps=float8.product) as products:
        y.sum().backward()
    assert (y.dtype, weight.grad.dtype, x.grad) == (dtype, dtype, None)
    ((left, right, _), _) = products.call_args
    assert products.call_count == 1
    assert (left[0].dtype, right[0].dtype) == (GRADIENT, OPERAND)


@needs_products
def test_an_input_is_kept_in_float8() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x, weight = torch.randn(16, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        float8_linear(x, weight, None)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in kept if tensor is not weight and tensor.dim()] == [
        ((16, 32), OPERAND)
    ]


def converted(model: nn.Module) -> set[str]:
    return {name for name, part in model.named_modules() if getattr(part, "product", None) is float8_linear}


def test_the_linear_layers_of_blocks_are_switched_and_nothing_else() -> None:
    model = build(TRANSFORMER)
    names = set(model.state_dict())
    assert converted(model) == set()
    with pretended((8, 9)):
        apply_float8(model)
    layers = ("attention.query", "attention.key", "attention.value", "attention.output")
    layers += ("feed_forward.gate", "feed_forward.up", "feed_forward.down")
    assert converted(model) == {f"blocks.{index}.{layer}" for index in (0, 1) for layer in layers}
    assert set(model.state_dict()) == names
    # The class is as it was: another model has ordinary products.
    assert converted(build(TRANSFORMER)) == set()
    assert float8_linear not in (ColumnParallelLinear.product, RowParallelLinear.product)


def test_a_model_without_a_linear_layer_in_its_blocks_is_refused() -> None:
    model = build(ConvnetConfig(height=8, width=8, channels=(4,), hidden=(), out_features=3))
    recipe = ModelRecipe(precision=PrecisionSpec(float8=True))
    with pytest.raises(Float8Error, match="the blocks have no linear layer"):
        parallelize(model, recipe, mesh.plan(ParallelSpec(), 0))


@needs_products
def test_a_transformer_in_float8_learns_as_without() -> None:
    """Gradients point the same way, though no element is the same; q, k and v are one product here too."""
    torch.manual_seed(0)
    tokens, found = torch.randint(0, 32, (4, 16)), []
    for switched in (False, True):
        model = build(TRANSFORMER, seed=1)
        if switched:
            with pretended((9, 0)):
                apply_float8(model)
        with patch.object(float8, "product", wraps=float8.product) as products:
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        # Per block: q, k and v together, the output, gate, up and down.
        assert products.call_count == (2 * 5 if switched else 0)
        loss.backward()
        found.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    (loss, gradient), (loss8, gradient8) = found
    assert loss8.item() == pytest.approx(loss.item(), rel=1e-3)
    assert nn.functional.cosine_similarity(gradient, gradient8, dim=0) > 0.99
    assert not torch.equal(gradient, gradient8)


def test_joint_products_of_float8_layers_go_through_float8() -> None:
    layers = [ColumnParallelLinear(32, rows, bias=False, copied_input=True) for rows in (32, 16, 16)]
    calls = []
    for layer in layers:
        nn.init.normal_(layer.weight)
        layer.product = lambda x, weight, bias: calls.append(weight.shape) or nn.functional.linear(x, weight, bias)
    x = torch.randn(2, 5, 32)
    together = joint(layers, x)
    assert calls == [(64, 32)]
    for each, layer in zip(together, layers, strict=True):
        torch.testing.assert_close(each, x @ layer.weight.t())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_device_without_float8_is_refused(device: str) -> None:
    model = build(TRANSFORMER, device=device)
    with pytest.raises(Float8Error, match=f"needs a CUDA device of sm_89 or later; this job runs on {device}"):
        apply_float8(model)
    assert converted(model) == set()


@pytest.mark.parametrize(("capability", "name"), [((8, 0), "80"), ((8, 6), "86"), ((7, 5), "75")])
def test_an_older_gpu_is_refused_by_name(capability: tuple[int, int], name: str) -> None:
    with pretended(capability), pytest.raises(Float8Error, match=f"needs sm_89 or later; Some GPU is sm_{name}"):
        apply_float8(build(TRANSFORMER))


def test_a_part_of_a_layer_that_does_not_suit_is_refused_with_its_shape() -> None:
    """The whole layer would do; what counts is a rank's part."""
    whole = TRANSFORMER.model_copy(update={"ffn_dim": 48})
    with pretended((9, 0)):
        apply_float8(build(whole))
        with pytest.raises(Float8Error, match=r"part of 0.feed_forward.gate is \(24, 64\); expected multiples of 16"):
            apply_float8(build(whole, mesh.plan(ParallelSpec(tp=2))))
