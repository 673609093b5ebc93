"""The least value of linear functions over boxes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from service.bounds.fused.building import block, flat, kernels_for, strides


def least(coefficients: Tensor, centre: Tensor, radius: Tensor) -> Tensor:
    """Return the least ``(batch, rows)`` of ``coefficients`` ``(batch or 1, rows, n)`` over boxes ``(batch, n)``."""
    kernels = kernels_for(coefficients, centre, radius)
    gradients = centre.requires_grad or radius.requires_grad
    repeated = coefficients.requires_grad and len(coefficients) != len(centre)
    if kernels is None or gradients or repeated:
        return _in_steps(coefficients, centre, radius)
    given = flat(coefficients), centre.contiguous(), radius.contiguous(), kernels
    if not (torch.is_grad_enabled() and coefficients.requires_grad):
        return _forward(*given)
    found: Tensor = _Least.apply(*given)  # type: ignore[no-untyped-call]
    return found


def _forward(a: Tensor, centre: Tensor, radius: Tensor, kernels: ModuleType) -> Tensor:
    batch, rows, n = len(centre), a.shape[1], a.shape[2]
    out = a.new_empty(batch, rows)
    if out.numel():
        kernels.forward_least[(out.numel(),)](a, centre, radius, out, n, rows, *strides(a), **block(n))
    return out


def _in_steps(coefficients: Tensor, centre: Tensor, radius: Tensor) -> Tensor:
    """Compute the same by torch's operators."""
    whole = coefficients.expand(len(centre), -1, -1)
    return (torch.bmm(whole, centre.unsqueeze(2)) - torch.bmm(whole.abs(), radius.unsqueeze(2))).squeeze(2)


class _Least(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, centre: Tensor, radius: Tensor, kernels: ModuleType) -> Tensor:
        ctx.save_for_backward(a, centre, radius)
        ctx.kernels = kernels
        return _forward(a, centre, radius, kernels)

    @staticmethod
    def backward(ctx: Any, onto: Tensor) -> tuple[Tensor, None, None, None]:
        a, centre, radius = ctx.saved_tensors
        rows, n = a.shape[1:]
        to_a = a.new_empty(len(centre), rows, n)
        if to_a.numel():
            onto = onto.contiguous()
            ctx.kernels.backward_least[(onto.numel(),)](a, centre, radius, onto, to_a, n, rows, *strides(a), **block(n))
        return to_a, None, None, None
