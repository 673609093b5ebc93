"""Products with a constant matrix."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from service.bounds.fused.building import kernels_for


def product_in_ascent(coefficients: Tensor, weight: Tensor) -> Tensor:
    """Return :func:`product` with a gradient computed in TF32, for searches whose gradient affects no bound."""
    kernels = kernels_for(coefficients, weight) if coefficients.requires_grad else None
    plain = weight.ndim != 2 or weight.requires_grad or coefficients.dtype != torch.float32
    if kernels is None or plain:
        return product(coefficients, weight)
    found: Tensor = _RoughProduct.apply(coefficients, weight, kernels)  # type: ignore[no-untyped-call]
    return found


def product(coefficients: Tensor, weight: Tensor) -> Tensor:
    """Return ``coefficients @ weight``.

    One product of two matrices: of coefficients in another order torch makes as many products as there are rows.
    """
    if weight.ndim != 2:
        return coefficients @ weight
    return (coefficients.reshape(-1, weight.shape[0]) @ weight).reshape(*coefficients.shape[:-1], weight.shape[1])


class _RoughProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coefficients: Tensor, weight: Tensor, kernels: ModuleType) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.kernels = kernels
        return product(coefficients, weight)

    @staticmethod
    def backward(ctx: Any, onto: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        onto, weight = onto.contiguous(), weight.contiguous()
        n, k = weight.shape
        m = onto.numel() // k
        out = onto.new_empty(*onto.shape[:-1], n)
        if out.numel():
            size = TILE["BLOCK_M"], TILE["BLOCK_N"]
            tiles = -(-m // size[0]) * -(-n // size[1])
            ctx.kernels.rough_product[(tiles,)](onto, weight, out, m, n, k, **TILE)
        return out, None, None


TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "GROUP": 8, "num_warps": 8, "num_stages": 3}
