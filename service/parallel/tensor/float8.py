"""Linear layers whose three matrix products run in float8 (Micikevicius et al., 2022).

Inputs and weights are rounded to e4m3, gradients to e5m2, each tensor with one scale from its own largest magnitude,
found anew in every pass. Parameters, their gradients and everything between layers keep their types. Where an operand
is divided over ranks, each rank scales its own part: products are scaled back before they are summed over
ranks, so parts need not agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from service.jobs.runtime import RefusedError
from service.jobs.spec.arithmetic import FLOAT8_MULTIPLE
from service.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from service.parallel.tensor.placement import local
from service.torch_internals.table import internal

OPERAND, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
CAPABILITY = (8, 9)

Scaled = tuple[Tensor, Tensor]
"""A float8 tensor and the float32 scalar that it is to be multiplied by."""


class Float8Error(RefusedError, ValueError):
    """The spec asks for float8, which cannot run here."""

    final = False


def apply_float8(model: nn.Module) -> int:
    """Switch the linear layers of ``model.blocks`` to float8, in place; return how many there are.

    Raises :class:`Float8Error` when a parameter is on a device that has no float8 products, or a layer's shape does
    not suit them.
    """
    internal("torch._scaled_mm")
    layers = dict(_linear_layers(model))
    for name, layer in layers.items():
        _check(name, local(layer.weight))
        layer.product = float8_linear
    return len(layers)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, ColumnParallelLinear | RowParallelLinear]]:
    for name, module in model.blocks.named_modules():  # type: ignore[union-attr]
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield name, module


def _check(name: str, weight: Tensor) -> None:
    if weight.device.type != "cuda":
        raise Float8Error(f"precision.float8 needs a CUDA device of sm_89 or later; this job runs on {weight.device}")
    if (found := torch.cuda.get_device_capability(weight.device)) < CAPABILITY:
        device = torch.cuda.get_device_name(weight.device)
        raise Float8Error(f"precision.float8 needs sm_89 or later; {device} is sm_{found[0]}{found[1]}")
    if any(size % FLOAT8_MULTIPLE for size in weight.shape):
        shape = tuple(weight.shape)
        raise Float8Error(
            f"precision.float8: a rank's part of {name} is {shape}; expected multiples of {FLOAT8_MULTIPLE}"
        )


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x Wᵀ + b`` with float8 products; ``x (…, in)``, the result in ``x``'s type."""
    result: Tensor = _Float8Linear.apply(x.flatten(0, -2), local(weight))  # type: ignore[no-untyped-call]
    result = result.unflatten(0, x.shape[:-1])  # type: ignore[no-untyped-call]
    return result if bias is None else result + local(bias)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, weight8 = scaled(x, OPERAND), scaled(weight, OPERAND)
        ctx.save_for_backward(*x8, weight)
        return product(x8, (weight8[0].t(), weight8[1]), x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x8, x_scale, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad
        gradient8, scale = scaled(gradient, GRADIENT)
        x_gradient = weight_gradient = None
        if for_x:
            weight8 = scaled(weight, OPERAND)
            x_gradient = product((gradient8, scale), (_columns(weight8[0]), weight8[1]), gradient.dtype)
        if for_weight:
            turned = gradient8.t().contiguous()
            weight_gradient = product((turned, scale), (_columns(x8), x_scale), weight.dtype)
        return x_gradient, weight_gradient


def scaled(x: Tensor, dtype: torch.dtype) -> Scaled:
    """Return ``x`` in ``dtype``, row-major, stretched so that its largest magnitude is the type's."""
    largest = x.abs().amax().float().clamp(min=1e-12)
    limit = torch.finfo(dtype).max
    stretched = (x.float() * (limit / largest)).clamp(-limit, limit)
    return stretched.to(dtype).contiguous(), largest / limit


def product(left: Scaled, right: Scaled, dtype: torch.dtype) -> Tensor:
    """Return ``left · right`` in ``dtype``; the left factor is row-major, the right one column-major.

    Only e4m3 products sum in the faster, shorter accumulators: gradients need the longer ones.
    """
    fast = left[0].dtype == right[0].dtype == OPERAND and left[0].is_cuda
    # By its name, since compilers trace this; :func:`apply_float8` has made sure that torch has it.
    return torch._scaled_mm(left[0], right[0], scale_a=left[1], scale_b=right[1], out_dtype=dtype, use_fast_accum=fast)


def _columns(x: Tensor) -> Tensor:
    """Return the same matrix, column-major."""
    return x.t().contiguous().t()
