"""The loss that computes its gradient with its value, against the ordinary one."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from service.parallel.tensor import vocabulary, vocabulary_parallel_cross_entropy

LARGE = st.sampled_from([1e-3, 1.0, 30.0, 1e4])


def sample(rows: int, width: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 100 + width)
    logits = torch.randn(rows, width, generator=generator, dtype=torch.float64) * scale
    return logits.to(dtype).requires_grad_(), torch.randint(0, width, (rows,), generator=generator)


def plain(logits: Tensor, targets: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """The ordinary loss in float64 and the gradient of ``factor`` times it."""
    wide = logits.detach().double().requires_grad_()
    loss = functional.cross_entropy(wide, targets)
    return loss, torch.autograd.grad(factor * loss, wide)[0]


@settings(deadline=None)
@given(rows=st.integers(1, 30), width=st.integers(1, 9), at_once=st.integers(1, 300), scale=LARGE)
def test_values_and_gradients_do_not_depend_on_what_is_computed_at_once(
    rows: int, width: int, at_once: int, scale: float
) -> None:
    logits, targets = sample(rows, width, scale)
    expected, gradient = plain(logits, targets, 3.0)
    with patch.object(vocabulary, "AT_ONCE", at_once):
        loss = vocabulary_parallel_cross_entropy(logits, targets)
        (3 * loss).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(logits.grad, gradient, rtol=1e-13, atol=1e-13)


def test_leading_dimensions_and_strides_do_not_matter() -> None:
    logits, targets = sample(24, 5)
    expected, gradient = plain(logits, targets)
    turned = logits.detach().view(4, 6, 5).permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    assert not turned.is_contiguous()
    loss = vocabulary_parallel_cross_entropy(turned, targets.view(4, 6))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(turned.grad, gradient.view(4, 6, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_logits_have_a_wide_loss_and_a_gradient_of_their_own_type(dtype: torch.dtype) -> None:
    logits, targets = sample(50, 7, 5.0, dtype)
    logits.data[torch.arange(25), targets[:25]] += 12  # all but certain, and right
    expected, gradient = plain(logits, targets)
    loss = vocabulary_parallel_cross_entropy(logits, targets)
    loss.backward()
    assert (loss.dtype, logits.grad.dtype) == (torch.float32, dtype)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=1e-2, atol=1e-9)


def test_the_gradient_is_all_that_is_kept() -> None:
    logits, targets = sample(6, 4)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        vocabulary_parallel_cross_entropy(logits, targets)
    assert [tuple(tensor.shape) for tensor in kept] == [(6, 4), (6,), ()]  # and which rows count, and how many
    assert kept[0].data_ptr() != logits.data_ptr()


def test_a_second_backward_is_refused() -> None:
    """The first one scales the kept gradient in place."""
    logits, targets = sample(6, 4)
    loss = vocabulary_parallel_cross_entropy(logits, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    logits, targets = sample(6, 4)
    with patch.object(torch.Tensor, "scatter_", side_effect=AssertionError("a gradient was computed")):
        found = vocabulary_parallel_cross_entropy(logits.detach(), targets)
        with pytest.raises(AssertionError, match="a gradient was computed"):
            vocabulary_parallel_cross_entropy(logits, targets)
    torch.testing.assert_close(found, plain(logits, targets)[0].detach())


def test_a_compiled_loss_is_the_same() -> None:
    logits, targets = sample(6, 4)
    compiled = torch.compile(vocabulary_parallel_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(logits, targets)
    loss.backward()
    expected, gradient = plain(logits, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad, gradient)
