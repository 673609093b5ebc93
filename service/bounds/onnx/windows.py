"""Converters of convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.nn import functional

from service.bounds.operators.onnx import Call, Converter, Shape, Value, Values, optional

CONVOLVE: Mapping[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED: Mapping[int, Callable[..., Tensor]] = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


def convolution(call: Call, values: Values, shape: Shape) -> Tensor:
    x, weight, bias = image(call, values[0]), *_constants(call, values)
    rank = x.ndim - 2
    dilations, groups = listed(call, "dilations", rank), int(call.attributes.get("group", 1))
    before, after = pads_of(call, values[0].shape[2:], list(weight.shape[2:]), dilations)
    x, padding = _padded(x, before, after)
    return CONVOLVE[rank](x, weight, bias, listed(call, "strides", rank), padding, dilations, groups).reshape(
        -1, *shape
    )


def transposed_convolution(call: Call, values: Values, shape: Shape) -> Tensor:
    """Convert without padding, then crop to the shape that the model gives, where its sides are not alike."""
    x, weight, bias = image(call, values[0]), *_constants(call, values)
    rank = x.ndim - 2
    strides, dilations = listed(call, "strides", rank), listed(call, "dilations", rank)
    extra, groups = listed(call, "output_padding", rank, 0), int(call.attributes.get("group", 1))
    pads = listed(call, "pads", 2 * rank, 0)
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
    """Return what is cut off before, by the rule for output shapes."""
    spare = [total - length for total, length in zip(whole, wanted, strict=True)]
    if min(spare) < 0:
        raise call.refuse("its output is larger than all that its kernel reaches")
    upper = call.attributes.get("auto_pad") == "SAME_UPPER"
    return [each // 2 if upper else each - each // 2 for each in spare]


def image(call: Call, value: Value) -> Tensor:
    """Return ``(instances, channels, …)``: the model's own batch of one taken away."""
    if value.constant or value.shape[0] != 1:
        raise call.refuse(f"its input has a batch of {value.shape[0]} within one instance; expected 1")
    return value.float.reshape(-1, *value.shape[1:])


def _constants(call: Call, values: Values) -> tuple[Tensor, Tensor | None]:
    bias = optional(values, 2)
    if not values[1].constant or (bias is not None and not bias.constant):
        raise call.refuse("its kernel or bias depends on the input")
    return values[1].float, None if bias is None else bias.float


def listed(call: Call, name: str, length: int, default: int = 1) -> list[int]:
    return [int(entry) for entry in call.attributes.get(name) or [default] * length]


def pads_of(call: Call, lengths: Sequence[int], kernel: list[int], dilations: list[int]) -> tuple[list[int], list[int]]:
    rank, mode = len(kernel), call.attributes.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        given = listed(call, "pads", 2 * rank, 0) if mode == "NOTSET" else [0] * (2 * rank)
        return given[:rank], given[rank:]
    before, after = [], []
    for length, size, dilation, stride in zip(lengths, kernel, dilations, listed(call, "strides", rank), strict=True):
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


CONVERTERS: Mapping[str, Converter] = {"Conv": convolution, "ConvTranspose": transposed_convolution}
