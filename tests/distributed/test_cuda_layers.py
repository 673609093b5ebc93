"""What only a GPU shows: float8 products, weights drawn there, totals that leave it without a wait."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from service.jobs.spec.model import TransformerConfig
from service.models import build
from service.models.initialize import Normal, draw, key_of, random_bits
from service.models.parallelize import apply_activation_checkpoint
from service.parallel.mesh import SINGLE
from service.parallel.tensor import vocabulary_parallel_cross_entropy
from service.parallel.tensor.float8 import (
    CAPABILITY,
    GRADIENT,
    OPERAND,
    Float8Error,
    apply_float8,
    float8_linear,
    scaled,
)
from service.training.gradients import NonFiniteError
from service.training.step_totals import RankShare, StepReduction


def why_no_float8() -> str:
    if not torch.cuda.is_available():
        return "needs a GPU; this machine has none"
    found = torch.cuda.get_device_capability()
    return "" if found >= CAPABILITY else f"needs a GPU of sm_89 or later; this one is sm_{found[0]}{found[1]}"


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; this machine has none")
needs_float8 = pytest.mark.skipif(bool(why_no_float8()), reason=why_no_float8())
pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
TRANSFORMER = TransformerConfig(vocab_size=64, dim=128, layers=2, heads=4, kv_heads=2, ffn_dim=256, max_sequence=32)


def restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    found, scale = scaled(x, dtype)
    return found.double() * scale.double()


@needs_float8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_the_rounded_factors(dtype: torch.dtype) -> None:
    """Compared with the rounded factors' exact product, only sums and the result's type round."""
    generator = torch.Generator(CUDA).manual_seed(0)
    x, weight, gradient = (
        torch.randn(shape, generator=generator, device=CUDA).to(dtype)
        for shape in ((4, 32, 128), (64, 128), (4, 32, 64))
    )
    x.requires_grad_()
    weight.requires_grad_()
    y = float8_linear(x, weight, None)
    y.backward(gradient)
    rows, matrix = restored(x.detach().flatten(0, 1), OPERAND), restored(weight.detach(), OPERAND)
    outer = restored(gradient.flatten(0, 1), GRADIENT)
    for found, left, right in (
        (y.detach().flatten(0, 1), rows, matrix.t()),
        (x.grad.flatten(0, 1), outer, matrix),
        (weight.grad, outer.t(), rows),
    ):
        assert found.dtype == dtype
        error = (found.double() - left @ right).abs()
        # Tensor cores align the summands of a float8 sum to some 13 bits of the largest one.
        allowed = (left.abs() @ right.abs()) * 2**-9 + (left @ right).abs() * torch.finfo(dtype).eps
        assert bool((error <= allowed).all())


@needs_float8
@pytest.mark.parametrize("choice", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_transformer_learns_in_float8_as_without(choice: str, compiled: bool) -> None:
    torch.manual_seed(0)
    tokens, found = torch.randint(0, 64, (8, 32), device=CUDA), []
    for switched in (False, True):
        model = build(TRANSFORMER, dtype=torch.bfloat16, device=CUDA, seed=1)
        if switched:
            apply_float8(model)
            if choice != "none":
                apply_activation_checkpoint(model, choice)  # type: ignore[arg-type]
            if compiled:
                model.compile(backend="aot_eager", fullgraph=True)
        loss = vocabulary_parallel_cross_entropy(model(tokens), tokens)
        loss.backward()
        gradients = [parameter.grad.float().flatten() for parameter in model.parameters()]
        found.append((loss.item(), torch.cat(gradients)))
    (loss, gradient), (loss8, gradient8) = found
    assert loss8 == pytest.approx(loss, rel=5e-3)
    assert nn.functional.cosine_similarity(gradient, gradient8, dim=0) > 0.98


@pytest.mark.skipif(not torch.cuda.is_available() or not why_no_float8(), reason="needs a GPU that is older than sm_89")
def test_an_older_gpu_is_refused() -> None:
    with pytest.raises(Float8Error, match=r"needs sm_89 or later; .* is sm_"):
        apply_float8(build(TRANSFORMER, device=CUDA))


@needs_gpu
def test_weights_are_drawn_alike_on_every_device() -> None:
    """The bits are equal; the numbers are up to the rounding of a logarithm, a root and a cosine."""
    key, counters = key_of(3, "w"), torch.arange(100_000)
    assert torch.equal(random_bits(key, counters.to(CUDA)).cpu(), random_bits(key, counters))
    on_cpu, on_gpu = (
        draw(Normal(0.02), key, (500, 200), None, SINGLE, dtype=torch.float32, device=device)
        for device in (torch.device("cpu"), CUDA)
    )
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-5, atol=0.02 * 1e-6)


@needs_gpu
def test_totals_leave_a_gpu_without_making_the_host_wait() -> None:
    loss, squared = torch.tensor(0.5, device=CUDA), torch.tensor(9.0, dtype=torch.float64, device=CUDA)
    StepReduction(RankShare(loss, squared, stop=False, memory_gib=1.0)).read(step=1)
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            busy = busy @ busy * 1e-3
        later = StepReduction(RankShare(loss + 0 * busy[0, 0].nan_to_num(), squared, stop=True, memory_gib=2.5))
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    totals = later.read(step=2)
    assert (totals.loss, totals.grad_norm, totals.stop, totals.memory_gib) == (0.5, 3.0, True, 2.5)


@needs_gpu
def test_totals_that_are_not_finite_are_errors_on_a_gpu_too() -> None:
    share = RankShare(torch.tensor(math.nan, device=CUDA), torch.tensor(1.0, device=CUDA).double(), stop=False)
    bad = StepReduction(share)
    with pytest.raises(NonFiniteError, match="the loss is not finite on rank 0 at step 4"):
        bad.read(step=4)
