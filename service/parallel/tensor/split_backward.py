"""Linear products whose weight gradient may be computed later than their input's gradient.

A zero-bubble pipeline (Qi et al., 2023) sends the gradient of a stage's input first and fills idle time with the
gradients of its weights. Both belong to one autograd node, so the node itself leaves the second half in a queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from service.parallel.tensor.placement import local


class WeightGradients:
    """Weight gradients of one backward that are still to be computed; holds the inputs and output gradients."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, weight: Tensor, x: Tensor, gradient: Tensor) -> None:
        self._pending.append((weight, x, gradient))

    def flush(self) -> int:
        """Add all of them to their parameters' ``grad``, first come first; returns how many there were."""
        count = len(self._pending)
        with torch.no_grad():
            while self._pending:
                weight, *factors = self._pending.pop(0)
                _accumulate(weight, _weight_gradient(*factors))
        return count


# Not a context variable: with activation checkpointing a layer runs again on the threads of the autograd engine.
_active: list[WeightGradients] = []


@contextmanager
def splitting_backward(queue: WeightGradients) -> Iterator[None]:
    """Split linear layers within: those that run forward here can be split; those that run backward here leave their
    weights to ``queue``.

    Wrap both passes of a micro-batch; one that runs backward outside computes everything at once.
    """
    _active.append(queue)
    try:
        yield
    finally:
        _active.pop()


def is_splitting_backward() -> bool:
    """Return whether layers that run now are to be split."""
    # The compiler comes first: a graph that looked at the queues would be guarded by them.
    return not torch.compiler.is_compiling() and bool(_active) and torch.is_grad_enabled()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x Wᵀ + b`` with parameters as the layer holds them (plain, or DTensors whose local part is meant).

    Traced and compiled graphs, and layers outside :func:`splitting_backward`, get the ordinary operator.
    """
    own_bias = None if bias is None else local(bias)
    if not is_splitting_backward() or not weight.requires_grad:
        return functional.linear(x, local(weight), own_bias)
    return _SplitBackwardLinear.apply(x, weight, own_bias)  # type: ignore[no-any-return,no-untyped-call]


class _SplitBackwardLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The parameter itself: activation checkpointing would hand back a detached copy, which is nobody's leaf.
        ctx.weight = weight
        ctx.save_for_backward(x)
        return functional.linear(x, local(weight), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        for_x, for_weight, for_bias = ctx.needs_input_grad
        x_gradient = gradient @ local(weight) if for_x else None
        bias_gradient = gradient.flatten(0, -2).sum(0) if for_bias else None
        if not for_weight:
            return x_gradient, None, bias_gradient
        if _active:
            # Detached, so that the queue holds values and no graph. The parameter itself is the leaf to add to.
            _active[-1].add(weight, x.detach(), gradient.detach())
            return x_gradient, None, bias_gradient
        return x_gradient, _like_parameter(weight, _weight_gradient(x, gradient)), bias_gradient


def _weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def _like_parameter(weight: Tensor, gradient: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return gradient
    return DTensor.from_local(gradient, weight.device_mesh, weight.placements, run_check=False)


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    if weight.grad is None:
        weight.grad = _like_parameter(weight, gradient)
    else:
        local(weight.grad).add_(gradient)
