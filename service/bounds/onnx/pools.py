"""Converters of pools: sliding windows without a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.onnx.windows import image, listed, pads_of
from service.bounds.operators.onnx import Array, Call, Converter, Shape, Values

AVERAGE: Mapping[int, Callable[..., Tensor]] = {
    1: functional.avg_pool1d,
    2: functional.avg_pool2d,
    3: functional.avg_pool3d,
}
LARGEST: Mapping[int, Callable[..., Tensor]] = {1: functional.max_pool1d, 2: functional.max_pool2d}


def average_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    """Windows that reach into the padding count it only when the model says so."""
    x = image(call, values[0])
    rank = x.ndim - 2
    kernel, strides = listed(call, "kernel_shape", rank), listed(call, "strides", rank)
    before, after = pads_of(call, values[0].shape[2:], kernel, [1] * rank)
    counted = bool(call.attributes.get("count_include_pad", 0))
    if not _is_plain(call, rank) or (any((*before, *after)) and not counted):
        return _mean_of_windows(x, _windows(call, values[0].shape[2:], shape[2:]), counted).reshape(-1, *shape)
    widths = [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair]
    return AVERAGE[rank](functional.pad(x, widths) if any(widths) else x, kernel, strides).reshape(-1, *shape)


def max_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    x = image(call, values[0])
    rank = x.ndim - 2
    if any(call.outputs[1:]):
        raise call.refuse("it gives indices too; one output is supported")
    kernel, strides = listed(call, "kernel_shape", rank), listed(call, "strides", rank)
    before, after = pads_of(call, values[0].shape[2:], kernel, listed(call, "dilations", rank))
    narrow = all(2 * width <= size for width, size in zip(before, kernel, strict=True))  # as torch wants them
    if rank in LARGEST and before == after and narrow and _is_plain(call, rank):
        return LARGEST[rank](x, kernel, strides, before).reshape(-1, *shape)
    return _largest_of_windows(x, _windows(call, values[0].shape[2:], shape[2:])).reshape(-1, *shape)


def global_average_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    rank = len(values[0].shape)
    return values[0].float.mean(dim=list(range(3, rank + 1)), keepdim=True)


def global_max_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    rank = len(values[0].shape)
    return values[0].float.amax(dim=list(range(3, rank + 1)), keepdim=True)


def _is_plain(call: Call, rank: int) -> bool:
    return not call.attributes.get("ceil_mode", 0) and all(step == 1 for step in listed(call, "dilations", rank))


def _windows(call: Call, given: Shape, wanted: Shape) -> Array:
    """Return the numbers of the pixels in each window, ``(windows, pixels)``: −1 in the padding, −2 beyond it."""
    rank = len(given)
    kernel, strides, dilations = (listed(call, name, rank) for name in ("kernel_shape", "strides", "dilations"))
    before, after = pads_of(call, given, kernel, dilations)
    along = []
    for index in range(rank):
        start = np.arange(wanted[index])[:, None] * strides[index] - before[index]
        place = start + np.arange(kernel[index]) * dilations[index]
        inside = (place >= 0) & (place < given[index])
        beyond = place >= given[index] + after[index]
        along.append(np.where(inside, place, np.where(beyond, -2, -1)))
    found = np.zeros((1, 1), dtype=np.int64)
    for places, length in zip(along, given, strict=True):
        first, second = found[:, None, :, None], places[None, :, None, :]
        both = np.where((first < 0) | (second < 0), np.minimum(np.minimum(first, second), -1), first * length + second)
        found = both.reshape(len(found) * len(places), -1)
    return found


def _entries(x: Tensor, numbers: Array) -> Tensor:
    """Return ``(instances, channels, windows, pixels)``."""
    flat = x.flatten(2).index_select(2, torch.from_numpy(numbers.reshape(-1)).to(x.device))
    return flat.reshape(*flat.shape[:2], *numbers.shape)


def _mean_of_windows(x: Tensor, windows: Array, counts_padding: bool) -> Tensor:
    counted = (windows >= 0).sum(axis=1) if not counts_padding else (windows >= -1).sum(axis=1)
    shares = (windows >= 0) / np.maximum(counted, 1)[:, None]
    return (_entries(x, np.maximum(windows, 0)) * torch.from_numpy(shares).to(x.device, x.dtype)).sum(dim=3)


def _largest_of_windows(x: Tensor, windows: Array) -> Tensor:
    """Take the maximum of each window; padding is replaced by one of the window's own pixels."""
    return _entries(x, np.where(windows >= 0, windows, windows.max(axis=1, keepdims=True))).amax(dim=3)


CONVERTERS: Mapping[str, Converter] = {
    "AveragePool": average_pool,
    "GlobalAveragePool": global_average_pool,
    "GlobalMaxPool": global_max_pool,
    "MaxPool": max_pool,
}
