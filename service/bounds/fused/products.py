"""Propagates coefficients of products of two bounded values, entry by entry or of matrices, through planes that bound
them.

A product has two planes below it and two above (McCormick, 1976). A place from 0 to 1 is one between the two below for
a positive coefficient, ``ly·x + lx·y − lx·ly`` and ``uy·x + ux·y − ux·uy``, and between the two above for a negative
one, ``uy·x + lx·y − lx·uy`` and ``ly·x + ux·y − ux·ly``: a row's coefficient has only one sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from service.bounds.fused.building import block, flat, kernels_for, strides

Ends = tuple[Tensor, Tensor]
OntoBoth = tuple[Tensor, Tensor, Tensor]
MOST_TERMS = 4096
"""Terms of a sum that one program works on."""


def propagate_products(coefficients: Tensor, places: Tensor, x: Ends, y: Ends) -> OntoBoth:
    """Return coefficients on both factors and a bias.

    ``coefficients`` are ``(batch or 1, rows, *shape)``, ``places`` ``(batch, rows, *shape)``, ends ``(batch, *shape)``.
    """
    setting = _setting(coefficients, places, (*x, *y), coefficients.shape[2:])
    if setting is None:
        return _products_in_steps(
            coefficients, places, *((low.unsqueeze(1), high.unsqueeze(1)) for low, high in (x, y))
        )
    ends = (each.contiguous() for each in (*x, *y))
    onto_x, onto_y, bias = _Products.apply(flat(coefficients), places.contiguous(), *ends, setting)  # type: ignore[no-untyped-call]
    return onto_x.reshape(places.shape), onto_y.reshape(places.shape), bias


def propagate_planes(coefficients: Tensor, x: Ends, y: Ends) -> OntoBoth | None:
    """Return what :func:`propagate_products` gives at places of 0; ``None`` without a kernel, or for a gradient."""
    shape, rows = coefficients.shape[2:], coefficients.shape[1]
    batch = max(len(coefficients), len(x[0]))
    kernels = kernels_for(coefficients, *x, *y, entries=batch * rows * shape.numel())
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (coefficients, *x, *y))
    if kernels is None or needs_gradient or len(x[0]) != batch:
        return None
    a, n = flat(coefficients), shape.numel()
    onto_x, onto_y = (a.new_empty(batch, rows, *shape) for _ in range(2))
    bias = a.new_empty(batch, rows)
    ends = [each.contiguous() for each in (*x, *y)]
    kernels.forward_products[(batch * rows,)](
        a, None, *ends, onto_x, onto_y, bias, n, rows, *strides(a), PLACED=False, **block(n)
    )
    return onto_x, onto_y, bias


def propagate_matrices(coefficients: Tensor, places: Tensor, x: Ends, y: Ends) -> OntoBoth:
    """Propagate through ``X·Y``: ends ``(batch, …, i, k)`` and ``(batch, …, k, j)``, places ``(batch, rows, …, i, k,
    j)``.
    """
    (*heads, height, inner), width = x[0].shape[1:], y[0].shape[-1]
    terms = (*heads, height, inner, width)
    setting = _setting(coefficients, places, (*x, *y), terms)
    padded = prod(_power(length) for length in (height, inner, width))
    if setting is None or padded > MOST_TERMS:
        return _matrices_in_steps(coefficients, places, x, y)
    ends = (each.contiguous() for each in (*x, *y))
    sizes = _Sizes(prod(heads), height, inner, width)
    onto_x, onto_y, bias = _Matrices.apply(flat(coefficients), places.contiguous(), *ends, sizes, setting)  # type: ignore[no-untyped-call]
    batch_rows = places.shape[:2]
    return onto_x.reshape(*batch_rows, *x[0].shape[1:]), onto_y.reshape(*batch_rows, *y[0].shape[1:]), bias


def _products_in_steps(coefficients: Tensor, places: Tensor, x: Ends, y: Ends) -> OntoBoth:
    """Compute the same by torch's operators, of ends ``(batch, rows or 1, *shape)``."""
    (x_low, x_high), (y_low, y_high) = x, y
    positive = coefficients.detach() > 0
    near, far = torch.where(positive, y_low, y_high), torch.where(positive, y_high, y_low)
    onto_x = coefficients * torch.lerp(near, far, places)
    onto_y = coefficients * torch.lerp(x_low.expand_as(near), x_high.expand_as(near), places)
    constant = torch.lerp(-x_low * near, -x_high * far, places)
    return onto_x, onto_y, (coefficients * constant).flatten(2).sum(dim=2)


def _matrices_in_steps(coefficients: Tensor, places: Tensor, x: Ends, y: Ends) -> OntoBoth:
    """Compute the same by torch's operators: a sum of products."""
    terms = coefficients.unsqueeze(-2)
    left = (x[0].unsqueeze(1).unsqueeze(-1), x[1].unsqueeze(1).unsqueeze(-1))
    right = (y[0].unsqueeze(1).unsqueeze(-3), y[1].unsqueeze(1).unsqueeze(-3))
    whole = torch.broadcast_shapes(left[0].shape, right[0].shape)  # type: ignore[no-untyped-call]
    wide = [(low.expand(whole), high.expand(whole)) for low, high in (left, right)]
    onto_x, onto_y, bias = _products_in_steps(terms.expand(*terms.shape[:2], *whole[2:]), places, wide[0], wide[1])
    return onto_x.sum(dim=-1), onto_y.sum(dim=-3), bias


@dataclass(frozen=True)
class _Sizes:
    heads: int
    height: int
    inner: int
    width: int

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        return self.heads, self.height, self.inner, self.width

    @property
    def tile(self) -> dict[str, int]:
        height, inner, width = (_power(each) for each in (self.height, self.inner, self.width))
        warps = max(1, min(8, height * inner * width // 256))
        return {"HEIGHT": height, "INNER": inner, "WIDTH": width, "num_warps": warps}


@dataclass(frozen=True, eq=False)
class _LaunchOfProducts:
    kernels: ModuleType
    batch: int
    rows: int


def _power(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()


def _setting(
    coefficients: Tensor, places: Tensor, ends: tuple[Tensor, ...], terms: tuple[int, ...]
) -> _LaunchOfProducts | None:
    """Return a launch; ``None`` without kernels, or if a gradient of a repeated tensor is needed."""
    kernels = kernels_for(coefficients, places, *ends, entries=places.numel())
    batch, rows = len(ends[0]), coefficients.shape[1]
    repeated = places.shape != (batch, rows, *terms) or (coefficients.requires_grad and len(coefficients) != batch)
    if kernels is None or repeated or any(each.requires_grad for each in ends):
        return None
    return _LaunchOfProducts(kernels, batch, rows)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, places: Tensor, *rest: Any) -> OntoBoth:
        *ends, setting = rest
        ctx.save_for_backward(a, places, *ends)
        ctx.setting = setting
        out = a.new_empty(setting.batch, setting.rows, a.shape[2]), a.new_empty(setting.batch, setting.rows, a.shape[2])
        bias = a.new_empty(setting.batch, setting.rows)
        if out[0].numel():
            n = a.shape[2]
            setting.kernels.forward_products[(bias.numel(),)](
                a, places, *ends, *out, bias, n, setting.rows, *strides(a), PLACED=True, **block(n)
            )
        return (*out, bias)

    @staticmethod
    def backward(ctx: Any, onto_x: Tensor, onto_y: Tensor, onto_bias: Tensor) -> tuple[Tensor | None, ...]:
        a, places, *_ = saved = ctx.saved_tensors
        setting, n = ctx.setting, a.shape[2]
        to_a = torch.empty_like(onto_x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        to_places = torch.empty_like(places)
        if places.numel():
            onto = (each.contiguous() for each in (onto_x, onto_y, onto_bias))
            setting.kernels.backward_products[(setting.batch * setting.rows,)](
                *saved, *onto, to_a, to_places, n, setting.rows, *strides(a), TO_A=to_a is not None, **block(n)
            )
        return to_a, to_places, *(None,) * 5


class _Matrices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, places: Tensor, *rest: Any) -> OntoBoth:
        *ends, sizes, setting = rest
        ctx.save_for_backward(a, places, *ends)
        ctx.sizes, ctx.setting = sizes, setting
        batch, rows = setting.batch, setting.rows
        heads, height, inner, width = sizes.numbers
        onto_x = a.new_empty(batch, rows, heads * height * inner)
        onto_y = a.new_empty(batch, rows, heads * inner * width)
        bias = a.new_empty(batch, rows, heads)
        if places.numel():
            setting.kernels.forward_matrices[(bias.numel(),)](
                a, places, *ends, onto_x, onto_y, bias, rows, *sizes.numbers, *strides(a), **sizes.tile
            )
        return onto_x, onto_y, bias.sum(dim=2)

    @staticmethod
    def backward(ctx: Any, onto_x: Tensor, onto_y: Tensor, onto_bias: Tensor) -> tuple[Tensor | None, ...]:
        a, places, *_ = saved = ctx.saved_tensors
        setting, sizes = ctx.setting, ctx.sizes
        batch, rows = setting.batch, setting.rows
        to_a = a.new_empty(batch, rows, a.shape[2]) if ctx.needs_input_grad[0] else None
        to_places = torch.empty_like(places)
        if places.numel():
            onto = (each.contiguous() for each in (onto_x, onto_y, onto_bias))
            flags = {"TO_A": to_a is not None, **sizes.tile}
            setting.kernels.backward_matrices[(batch * rows * sizes.heads,)](
                *saved, *onto, to_a, to_places, rows, *sizes.numbers, *strides(a), **flags
            )
        return to_a, to_places, *(None,) * 6
