"""Weight gradients that are computed later are those that would have been computed at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from service.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from service.parallel.tensor.linear import WeightGradients, splitting_backward


def model() -> nn.Sequential:
    torch.manual_seed(0)
    built = nn.Sequential(ColumnParallelLinear(4, 8), nn.Tanh(), RowParallelLinear(8, 3, bias=False))
    for parameter in built.parameters():
        nn.init.normal_(parameter)
    return built.double()


def gradients(module: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def gradients_at_once(module: nn.Module, x: Tensor) -> list[Tensor]:
    module(x).sum().backward()
    found = gradients(module)
    module.zero_grad()
    return found


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("differentiable", [False, True])
def test_halves_make_the_whole(recomputed: bool, differentiable: bool) -> None:
    """Over two micro-batches, whose weights come in one go; biases and inputs don't wait."""
    module, batches = model(), torch.randn(2, 5, 6, 4, dtype=torch.float64).unbind()
    whole, split = ([each.clone().requires_grad_(differentiable) for each in batches] for _ in range(2))
    for x in whole:
        module(x).square().sum().backward()
    expected = gradients(module)
    module.zero_grad()
    queue = WeightGradients()
    for x in split:
        with splitting_backward(queue):
            loss = (checkpoint(module, x, use_reentrant=False) if recomputed else module(x)).square().sum()
        with splitting_backward(queue):
            loss.backward()
    assert [parameter.grad is None for parameter in module.parameters()] == [True, False, True]
    assert len(queue) == queue.flush() == 4
    assert len(queue) == 0
    for got, wanted in zip(gradients(module), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    for mine, theirs in zip(split, whole, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_backward_outside_computes_everything_at_once() -> None:
    module, x = model(), torch.randn(5, 4, dtype=torch.float64)
    expected = gradients_at_once(module, x)
    queue = WeightGradients()
    with splitting_backward(queue):
        loss = module(x).sum()
    loss.backward()
    assert len(queue) == 0
    torch.testing.assert_close(gradients(module), expected)


def test_layers_run_the_plain_operator_where_nothing_is_deferred() -> None:
    module, x = model(), torch.randn(5, 4, dtype=torch.float64)
    assert "_SplitBackwardLinear" not in type(module(x).grad_fn).__name__
    with splitting_backward(WeightGradients()):
        assert "_SplitBackwardLinear" in type(module(x).grad_fn).__name__
        with torch.no_grad():
            assert module(x).grad_fn is None


def test_compiled_layers_compute_both_at_once() -> None:
    module, x = model(), torch.randn(5, 4, dtype=torch.float64)
    expected = gradients_at_once(module, x)
    module.compile(backend="aot_eager", fullgraph=True)
    queue = WeightGradients()
    with splitting_backward(queue):
        loss = module(x).sum()
        loss.backward()
    assert len(queue) == 0
    torch.testing.assert_close(gradients(module), expected)
