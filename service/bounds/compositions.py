"""Operators written by means of others, which have rules: what they are made of is bounded instead of them.

Each entry has its operator's signature. All of them are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def clamp(x: Tensor, lowest: float | None = None, highest: float | None = None) -> Tensor:
    if lowest is not None:
        x = lowest + torch.relu(x - lowest)
    return x if highest is None else highest - torch.relu(highest - x)


def hardtanh(x: Tensor, min_val: float = -1, max_val: float = 1) -> Tensor:
    return clamp(x, min_val, max_val)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    return y + torch.relu(x - y)


def minimum(x: Tensor, y: Tensor) -> Tensor:
    return y - torch.relu(y - x)


def batch_norm(  # noqa: PLR0917 - the signature of the operator, as below
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    """With the running statistics: a multiple of each channel and a constant."""
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale
    if bias is not None:
        shift = shift + bias
    trailing = [1] * (x.ndim - 2)
    return x * scale.reshape(-1, *trailing) + shift.reshape(-1, *trailing)


def layer_norm(  # noqa: PLR0917
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    over = list(range(-len(normalized_shape), 0))
    centred = x - x.mean(over, keepdim=True)
    normed = centred * torch.rsqrt((centred * centred).mean(over, keepdim=True) + eps)
    return _scaled(normed, weight, bias)


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    over = list(range(-len(normalized_shape), 0))
    smallest = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled(x * torch.rsqrt((x * x).mean(over, keepdim=True) + smallest), weight, None)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def softmax(x: Tensor, dim: int, half_to_float: Any = None) -> Tensor:
    """Without the usual shift, which changes no value: bounds of large scores become infinite."""
    powers = torch.exp(x)
    return powers * torch.reciprocal(powers.sum([dim], keepdim=True))


def average_pool(  # noqa: PLR0917
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """A convolution of each channel with a constant kernel."""
    dimensions, channels = x.ndim - 2, x.shape[1]
    kernel = _each(kernel_size, dimensions)
    pads, steps = _each(padding, dimensions), _each(stride or kernel, dimensions)
    if ceil_mode or (any(pads) and not count_include_pad):
        raise NotImplementedError("average pooling with ceil_mode, or with padding that is not counted")
    weight = torch.ones(channels, 1, *kernel, dtype=x.dtype, device=x.device)
    divisor = divisor_override or torch.Size(kernel).numel()
    dilation, no_padding = [1] * dimensions, [0] * dimensions
    pooled: Tensor = aten.convolution(x, weight / divisor, None, steps, pads, dilation, False, no_padding, channels)
    return pooled


def max_pool(  # noqa: PLR0917
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Tensor:
    """The maximum of the window's entries, pair by pair.

    A window that reaches over the border also holds the border's entry, so that repeating it changes nothing.
    """
    dimensions = x.ndim - 2
    kernel = _each(kernel_size, dimensions)
    pads, steps = _each(padding, dimensions), _each(stride or kernel, dimensions)
    if ceil_mode or any(step != 1 for step in dilation):
        raise NotImplementedError("max pooling with ceil_mode or dilation")
    for index in range(dimensions):
        x = _repeat_border(x, index + 2, pads[index])
    reach = [(x.shape[index + 2] - kernel[index]) // steps[index] + 1 for index in range(dimensions)]
    entries = []
    for offsets in product(*(range(length) for length in kernel)):
        entry = x
        for index, offset in enumerate(offsets):
            entry = aten.slice(entry, index + 2, offset, offset + (reach[index] - 1) * steps[index] + 1, steps[index])
        entries.append(entry)
    while len(entries) > 1:
        paired = [maximum(first, second) for first, second in zip(entries[::2], entries[1::2], strict=False)]
        entries = paired + entries[len(paired) * 2 :]
    return entries[0]


def _repeat_border(x: Tensor, dim: int, width: int) -> Tensor:
    if width == 0:
        return x
    first, last = aten.slice(x, dim, 0, 1), aten.slice(x, dim, x.shape[dim] - 1, x.shape[dim])
    return torch.cat([first] * width + [x] + [last] * width, dim)


def _each(given: Sequence[int], dimensions: int) -> list[int]:
    values = list(given)
    return values * dimensions if len(values) == 1 else values


def select(x: Tensor, dim: int, index: int) -> Tensor:
    start = index if index >= 0 else index + x.shape[dim]
    chosen: Tensor = aten.slice(x, dim, start, start + 1)
    return chosen.squeeze(dim)


def split_with_sizes(x: Tensor, split_sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    ends = [sum(split_sizes[: index + 1]) for index in range(len(split_sizes))]
    return [aten.slice(x, dim, end - size, end) for end, size in zip(ends, split_sizes, strict=True)]


COMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.clamp.default: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_max.default: lambda x, highest: clamp(x, None, highest),
    aten.hardtanh.default: hardtanh,
    aten.relu6.default: lambda x: clamp(x, 0.0, 6.0),
    aten.maximum.default: maximum,
    aten.minimum.default: minimum,
    aten.batch_norm.default: batch_norm,
    aten._native_batch_norm_legit_no_training.default: lambda x, weight, bias, mean, var, momentum, eps: (
        batch_norm(x, weight, bias, mean, var, False, momentum, eps),
        x.new_empty(0),
        x.new_empty(0),
    ),
    aten.layer_norm.default: layer_norm,
    aten.rms_norm.default: rms_norm,
    aten.softmax.int: lambda x, dim, dtype=None: softmax(x, dim),
    aten._softmax.default: softmax,
    aten.avg_pool1d.default: average_pool,
    aten.avg_pool2d.default: average_pool,
    aten.avg_pool3d.default: average_pool,
    aten.max_pool1d.default: max_pool,
    aten.max_pool2d.default: max_pool,
    aten.select.int: select,
    aten.split_with_sizes.default: split_with_sizes,
}
