"""Computes the least value of linear functions over boxes, and of rows over images, in patches.

Patches have only kernels: ``None`` for a case without one.
"""

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
    at_centre = torch.bmm(whole, centre.unsqueeze(2))
    return torch.baddbmm(at_centre, whole.abs(), radius.unsqueeze(2), alpha=-1).squeeze(2)


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


Pair = tuple[int, int]


def propagate_patches(
    values: Tensor, place: Tensor, moves: tuple[Pair, Pair], lines: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor | None] | None:
    """Propagate values ``(b, rows, channels, height, width)`` of patches through lines over the pixels that they cover.

    ``place`` ``(batch or 1, rows, 2)`` times the first of ``moves`` plus the second is a patch's upper left corner.
    Lines are slopes and intercepts ``(batch, …, channels, tall, broad)``, the lower first. Gives values, which are 0
    outside of the images, and a bias.
    """
    given = [each for each in lines if each is not None]
    kernels = kernels_for(values, *given)
    if kernels is None or (torch.is_grad_enabled() and any(each.requires_grad for each in (values, *given))):
        return None
    batch, rows, size = len(given[0]), values.shape[1], values.shape[2:]
    out = values.new_empty(batch, rows, *size)
    bias = values.new_empty(batch, rows) if len(given) > SLOPES else None
    images = [None if each is None else each.contiguous() for each in lines]
    if out.numel():
        a = flat(values)
        numbers = rows, *given[0].shape[-3:], *size[1:], *strides(a), *_place_arguments(place, moves)
        flags = {"BELOW": lines[2] is not None, "ABOVE": lines[3] is not None, **block(size.numel())}
        kernels.lines_in_patches[(batch * rows,)](a, place.contiguous(), *images, out, bias, *numbers, **flags)
    return out, bias


SLOPES = 2


def least_in_patches(
    values: Tensor, place: Tensor, moves: tuple[Pair, Pair], lower: Tensor, upper: Tensor
) -> Tensor | None:
    """Return the least value ``(batch, rows)`` over boxes of images; see :func:`propagate_patches`."""
    kernels = kernels_for(values, lower, upper)
    if kernels is None or (torch.is_grad_enabled() and any(each.requires_grad for each in (values, lower, upper))):
        return None
    batch, rows, size = len(lower), values.shape[1], values.shape[2:]
    out = values.new_empty(batch, rows)
    if out.numel():
        a = flat(values)
        numbers = rows, *lower.shape[-3:], *size[1:], *strides(a), *_place_arguments(place, moves)
        ends = lower.contiguous(), upper.contiguous()
        kernels.least_in_patches[(batch * rows,)](a, place.contiguous(), *ends, out, *numbers, **block(size.numel()))
    return out


def _place_arguments(place: Tensor, moves: tuple[Pair, Pair]) -> tuple[int, ...]:
    return (place.shape[1] * 2 if len(place) > 1 else 0, *moves[0], *moves[1])
