"""Propagates coefficients through lines of a table."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from service.bounds.fused.building import block, flat, kernels_for, strides


def propagate_table(coefficients: Tensor, places: Tensor, slopes: Tensor, intercepts: Tensor) -> tuple[Tensor, Tensor]:
    """Propagate through the line at each entry's place: 0 is the first of a table, 1 the last; between two, what lies
    between.

    ``coefficients`` and ``places`` are ``(batch or 1, rows, n)``, ``(batch, rows or 1, n)``; tables are ``(batch,
    2·lines, n)`` with the lower lines, for positive coefficients, first. Gives coefficients and a bias.
    """
    kernels = kernels_for(coefficients, places, slopes, intercepts, entries=places.numel())
    whole = (len(slopes), coefficients.shape[1], coefficients.shape[2])
    repeated = places.shape != whole or (coefficients.requires_grad and coefficients.shape != whole)
    if kernels is None or repeated or slopes.requires_grad or intercepts.requires_grad:
        return _propagate_table_in_steps(coefficients, places, slopes, intercepts)
    given = (flat(coefficients), places.contiguous(), slopes.contiguous(), intercepts.contiguous())
    found: tuple[Tensor, Tensor] = _Table.apply(*given, kernels)  # type: ignore[no-untyped-call]
    return found


def _propagate_table_in_steps(
    coefficients: Tensor, places: Tensor, slopes: Tensor, intercepts: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the same by torch's operators."""
    lines = slopes.shape[1] // 2
    a, place = torch.broadcast_tensors(coefficients, places * (lines - 1))  # type: ignore[no-untyped-call]
    line = place.detach().floor().clamp(0, lines - 2)
    beyond = place - line
    index = line.long() + lines * (a.detach() < 0)

    first = slopes.gather(1, index), intercepts.gather(1, index)
    rises = slopes.gather(1, index + 1) - first[0], intercepts.gather(1, index + 1) - first[1]
    # If one of two lines is not finite, only the first counts: a mixed slope with its intercept would not be a line.
    both = rises[0].isfinite() & rises[1].isfinite()
    slope, intercept = (
        torch.addcmul(start, beyond, torch.where(both, rise, torch.zeros_like(rise)))
        for start, rise in zip(first, rises, strict=True)
    )
    return a * slope, (a * intercept).sum(dim=2)


class _Table(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - what autograd passes has no names
        ctx: Any, a: Tensor, places: Tensor, slopes: Tensor, intercepts: Tensor, kernels: ModuleType
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, places, slopes, intercepts)
        ctx.kernels = kernels
        batch, rows, n = places.shape
        out, bias = torch.empty_like(places), a.new_empty(batch, rows)
        if out.numel():
            kernels.forward_table[(batch * rows,)](
                a, places, slopes, intercepts, out, bias, n, rows, slopes.shape[1] // 2, *strides(a), **block(n)
            )
        return out, bias

    @staticmethod
    def backward(ctx: Any, onto: Tensor, onto_bias: Tensor) -> tuple[Tensor | None, ...]:
        a, places, slopes, _ = saved = ctx.saved_tensors
        batch, rows, n = places.shape
        to_a = torch.empty_like(places) if ctx.needs_input_grad[0] else None
        to_places = torch.empty_like(places)
        if onto.numel():
            gradients = onto.contiguous(), onto_bias.contiguous(), to_a, to_places
            numbers = n, rows, slopes.shape[1] // 2, *strides(a)
            ctx.kernels.backward_table[(batch * rows,)](*saved, *gradients, *numbers, TO_A=to_a is not None, **block(n))
        return to_a, to_places, None, None, None


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

    This is one product of two matrices: for coefficients in another order, torch makes a product per row.
    """
    if weight.ndim != 2 or coefficients.is_contiguous():
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
