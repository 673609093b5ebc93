"""Converters of operators that slide a window: convolutions and pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.nn import functional

from service.bounds.onnx.reading import Call
from service.bounds.onnx.values import Value

Values = Sequence[Value]
Shape = tuple[int, ...]
CONVOLVE: Mapping[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED: Mapping[int, Callable[..., Tensor]] = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}
AVERAGE: Mapping[int, Callable[..., Tensor]] = {
    1: functional.avg_pool1d,
    2: functional.avg_pool2d,
    3: functional.avg_pool3d,
}
LARGEST: Mapping[int, Callable[..., Tensor]] = {1: functional.max_pool1d, 2: functional.max_pool2d}


def convolution(call: Call, values: Values, shape: Shape) -> Tensor:
    x, weight, bias = _image(call, values[0]), *_constants(call, values)
    rank = x.ndim - 2
    dilations, groups = _list(call, "dilations", rank), int(call.attributes.get("group", 1))
    before, after = _pads(call, values[0].shape[2:], list(weight.shape[2:]), dilations)
    x, padding = _padded(x, before, after)
    return CONVOLVE[rank](x, weight, bias, _list(call, "strides", rank), padding, dilations, groups).reshape(-1, *shape)


def transposed_convolution(call: Call, values: Values, shape: Shape) -> Tensor:
    """Without padding, then cropped to the shape that the model gives."""
    x, weight, bias = _image(call, values[0]), *_constants(call, values)
    rank = x.ndim - 2
    strides, dilations = _list(call, "strides", rank), _list(call, "dilations", rank)
    extra = _list(call, "output_padding", rank, 0)
    if call.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or "output_shape" in call.attributes:
        raise call.refuse("auto_pad and output_shape are not supported; expected pads")
    groups, pads = int(call.attributes.get("group", 1)), _list(call, "pads", 2 * rank, 0)
    if pads[:rank] == pads[rank:]:
        found = TRANSPOSED[rank](x, weight, bias, strides, pads[:rank], extra, groups, dilations)
        return found.reshape(-1, *shape)
    found = TRANSPOSED[rank](x, weight, bias, strides, 0, extra, groups, dilations)
    for index in range(rank):
        found = found.narrow(index + 2, pads[index], shape[index + 2])
    return found.reshape(-1, *shape)


def average_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    """Windows that reach into the padding count it only when the model says so."""
    x = _image(call, values[0])
    rank = x.ndim - 2
    kernel, strides = _window(call, rank)
    before, after = _pads(call, values[0].shape[2:], kernel, [1] * rank)
    widths = [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair]
    found = AVERAGE[rank](functional.pad(x, widths) if any(widths) else x, kernel, strides)
    if any(widths) and not call.attributes.get("count_include_pad", 0):
        inside = functional.pad(x.new_ones(1, 1, *values[0].shape[2:]), widths)
        found = found / AVERAGE[rank](inside, kernel, strides)[0]
    return found.reshape(-1, *shape)


def max_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    x = _image(call, values[0])
    rank = x.ndim - 2
    kernel, strides = _window(call, rank)
    before, after = _pads(call, values[0].shape[2:], kernel, [1] * rank)
    if rank not in LARGEST or before != after or len(call.outputs) > 1:
        raise call.refuse("one output, one or two dimensions and as much padding on both sides are supported")
    return LARGEST[rank](x, kernel, strides, before).reshape(-1, *shape)


def global_average_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    rank = len(values[0].shape)
    return values[0].float.mean(dim=list(range(3, rank + 1)), keepdim=True)


def global_max_pool(call: Call, values: Values, shape: Shape) -> Tensor:
    rank = len(values[0].shape)
    return values[0].float.amax(dim=list(range(3, rank + 1)), keepdim=True)


def _image(call: Call, value: Value) -> Tensor:
    """``(instances, channels, …)``: the model's own batch of one taken away."""
    if value.constant or value.shape[0] != 1:
        raise call.refuse(f"its input has a batch of {value.shape[0]} within one instance; expected 1")
    return value.float.reshape(-1, *value.shape[1:])


def _constants(call: Call, values: Values) -> tuple[Tensor, Tensor | None]:
    if not all(value.constant for value in values[1:]):
        raise call.refuse("its kernel or bias depends on the input")
    return values[1].float, values[2].float if len(values) > 2 else None


def _list(call: Call, name: str, length: int, default: int = 1) -> list[int]:
    return [int(entry) for entry in call.attributes.get(name) or [default] * length]


def _window(call: Call, rank: int) -> tuple[list[int], list[int]]:
    if call.attributes.get("ceil_mode", 0) or any(step != 1 for step in _list(call, "dilations", rank)):
        raise call.refuse("ceil_mode and dilations are not supported")
    return _list(call, "kernel_shape", rank), _list(call, "strides", rank)


def _pads(call: Call, lengths: Sequence[int], kernel: list[int], dilations: list[int]) -> tuple[list[int], list[int]]:
    rank, mode = len(kernel), call.attributes.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        given = _list(call, "pads", 2 * rank, 0) if mode == "NOTSET" else [0] * (2 * rank)
        return given[:rank], given[rank:]
    before, after = [], []
    for length, size, dilation, stride in zip(lengths, kernel, dilations, _list(call, "strides", rank), strict=True):
        missing = max((-(-length // stride) - 1) * stride + (size - 1) * dilation + 1 - length, 0)
        small, large = missing // 2, missing - missing // 2
        before.append(large if mode == "SAME_LOWER" else small)
        after.append(small if mode == "SAME_LOWER" else large)
    return before, after


def _padded(x: Tensor, before: list[int], after: list[int]) -> tuple[Tensor, list[int]]:
    """Padding by the operator itself where both sides are alike, else done here."""
    if before == after:
        return x, before
    widths = [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair]
    return functional.pad(x, widths), [0] * len(before)
