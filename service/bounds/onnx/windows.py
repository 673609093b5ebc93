"""Converters of sliding windows: convolutions, and pools, which have no kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.operators.conversion import Array, Call, Converter, Shape, Value, Values, optional, repeated
from service.formats.onnx import ONLY_PADDING, holds_padding_only, listed, pads_of, windows_along

CONVOLVE: Mapping[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED: Mapping[int, Callable[..., Tensor]] = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


def convolution(call: Call, values: Values, shape: Shape) -> Tensor:
    x, weight, bias = _image(call, values[0]), *_constants(call, values)
    rank = x.ndim - 2
    dilations, groups = listed(call.attributes, "dilations", rank), int(call.attributes.get("group", 1))
    before, after = pads_of(call.attributes, values[0].shape[2:], list(weight.shape[2:]), dilations)
    x, padding = _padded(x, before, after)
    strides = listed(call.attributes, "strides", rank)
    return CONVOLVE[rank](x, weight, bias, strides, padding, dilations, shape[0] * groups).reshape(-1, *shape)


def _transposed_convolution(call: Call, values: Values, shape: Shape) -> Tensor:
    """Convolve without padding, then crop to the model's shape, if the padding of two sides differs."""
    x, weight, bias = _image(call, values[0]), *_constants(call, values)
    rank = x.ndim - 2
    strides, dilations = listed(call.attributes, "strides", rank), listed(call.attributes, "dilations", rank)
    extra, groups = listed(call.attributes, "output_padding", rank, 0), shape[0] * int(call.attributes.get("group", 1))
    pads = listed(call.attributes, "pads", 2 * rank, 0)
    given = "output_shape" not in call.attributes and call.attributes.get("auto_pad", "NOTSET") == "NOTSET"
    if given and pads[:rank] == pads[rank:]:
        found = TRANSPOSED[rank](x, weight, bias, strides, pads[:rank], extra, groups, dilations)
        return found.reshape(-1, *shape)
    found = TRANSPOSED[rank](x, weight, bias, strides, 0, extra, groups, dilations)
    begins = pads[:rank] if given else _begins(call, found.shape[2:], shape[2:])
    for index in range(rank):
        found = found.narrow(index + 2, begins[index], shape[index + 2])
    return found.reshape(-1, *shape)


def _begins(call: Call, whole: Shape, wanted: Shape) -> list[int]:
    """Return the padding at the beginning, by the rule for output shapes."""
    spare = [total - length for total, length in zip(whole, wanted, strict=True)]
    if min(spare) < 0:
        raise call.refuse("its output is larger than all that its kernel reaches")
    upper = call.attributes.get("auto_pad") == "SAME_UPPER"
    return [each // 2 if upper else each - each // 2 for each in spare]


def _image(call: Call, value: Value) -> Tensor:
    """Return ``(instances, channels, …)``: images of the model's own batch are channels of one, each a group."""
    if value.constant:
        raise call.refuse("its input is constant")
    return value.float.reshape(-1, value.shape[0] * value.shape[1], *value.shape[2:])


def _constants(call: Call, values: Values) -> tuple[Tensor, Tensor | None]:
    bias = optional(values, 2)
    if not values[1].constant or (bias is not None and not bias.constant):
        raise call.refuse("its kernel or bias depends on the input")
    batch = values[0].shape[0]
    return repeated(values[1], batch), None if bias is None else repeated(bias, batch)


def _padded(x: Tensor, before: list[int], after: list[int]) -> tuple[Tensor, list[int]]:
    """Leave equal padding of both sides to the operator, and pad here otherwise."""
    if before == after:
        return x, before
    widths = [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair]
    return functional.pad(x, widths), [0] * len(before)


AVERAGE: Mapping[int, Callable[..., Tensor]] = {
    1: functional.avg_pool1d,
    2: functional.avg_pool2d,
    3: functional.avg_pool3d,
}
LARGEST: Mapping[int, Callable[..., Tensor]] = {1: functional.max_pool1d, 2: functional.max_pool2d}


def _average_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    """Windows that reach into the padding count it only when the model says so."""
    x = _image(call, values[0])
    rank = x.ndim - 2
    kernel, strides = listed(call.attributes, "kernel_shape", rank), listed(call.attributes, "strides", rank)
    before, after = pads_of(call.attributes, values[0].shape[2:], kernel, [1] * rank)
    counted = bool(call.attributes.get("count_include_pad", 0))
    if not _is_plain(call, rank) or (any((*before, *after)) and not counted):
        return _mean_of_windows(x, _windows(call, values[0].shape[2:], shape[2:]), counted).reshape(-1, *shape)
    widths = [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair]
    return AVERAGE[rank](functional.pad(x, widths) if any(widths) else x, kernel, strides).reshape(-1, *shape)


def _max_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    x = _image(call, values[0])
    rank = x.ndim - 2
    if any(call.outputs[1:]):
        raise call.refuse("it gives indices too; one output is supported")
    kernel, strides = listed(call.attributes, "kernel_shape", rank), listed(call.attributes, "strides", rank)
    before, after = pads_of(call.attributes, values[0].shape[2:], kernel, listed(call.attributes, "dilations", rank))
    narrow = all(2 * width <= size for width, size in zip(before, kernel, strict=True))  # as torch wants them
    if rank in LARGEST and before == after and narrow and _is_plain(call, rank):
        return LARGEST[rank](x, kernel, strides, before).reshape(-1, *shape)
    return _largest_of_windows(x, _windows(call, values[0].shape[2:], shape[2:])).reshape(-1, *shape)


def _lp_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    """Return the p-norm of each window; padding counts as 0."""
    x, p = _image(call, values[0]), int(call.attributes.get("p", 2))
    windows = _windows(call, values[0].shape[2:], shape[2:])
    inside = torch.from_numpy(windows >= 0).to(x.device, x.dtype)
    sizes = (_entries(x, np.maximum(windows, 0)) * inside).abs()
    found = sizes.sum(dim=3) if p == 1 else sizes.pow(p).sum(dim=3).pow(1 / p)
    return found.reshape(-1, *shape)


def _global_average_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    rank = len(values[0].shape)
    return values[0].float.mean(dim=list(range(3, rank + 1)), keepdim=True)


def _global_max_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    rank = len(values[0].shape)
    return values[0].float.amax(dim=list(range(3, rank + 1)), keepdim=True)


def _is_plain(call: Call, rank: int) -> bool:
    return not call.attributes.get("ceil_mode", 0) and all(
        step == 1 for step in listed(call.attributes, "dilations", rank)
    )


def _windows(call: Call, given: Shape, wanted: Shape) -> Array:
    """Return the numbers of the pixels in each window, ``(windows, pixels)``: −1 in the padding, −2 beyond it.

    A window without pixels is refused: its largest is the least number of onnxruntime's type, and its mean undefined.
    """
    along = windows_along(call.attributes, given, wanted)
    if holds_padding_only(along):
        raise call.refuse(ONLY_PADDING)
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
    "AveragePool": _average_pool,
    "Conv": convolution,
    "ConvTranspose": _transposed_convolution,
    "GlobalAveragePool": _global_average_pool,
    "GlobalMaxPool": _global_max_pool,
    "LpPool": _lp_pool,
    "MaxPool": _max_pool,
}
