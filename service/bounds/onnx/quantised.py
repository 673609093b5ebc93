"""Converters of quantisation: whole numbers between two ends, and back, and products of such numbers.

Rounding is a floor, with both sides of its ties. A scale that depends on the entries, as in ``DynamicQuantizeLinear``,
is a value like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from onnx import helper
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.onnx.matrices import matrix_product
from service.bounds.onnx.windows import convolution
from service.bounds.operators.conversion import Array, Call, Converter, Shape, Value, Values, optional

LEVELS = 255.0
"""The largest number of ``DynamicQuantizeLinear``; the least is 0."""
_SECOND = {"ConvInteger": 1, "MatMulInteger": 1, "QLinearConv": 3, "QLinearMatMul": 3}
"""The position of the second factor among the inputs of integer products."""


def saturation(calls: Sequence[Call], constants: Mapping[str, Array]) -> str:
    """Return which products onnxruntime may compute differently from their definition, and what to write instead; empty
    without any.

    Processors without instructions for sums of unsigned by signed numbers add pairs of them in 16 bits.
    """
    for call in calls:
        weights = constants.get(call.inputs[_SECOND[call.operator]]) if call.operator in _SECOND else None
        if weights is not None and weights.dtype == np.int8:
            return (
                f"; {call} has signed weights, and sums of their products with unsigned numbers saturate in "
                "onnxruntime on some processors: expected weights of 7 bits (reduce_range=True) or unsigned ones, or "
                "QuantizeLinear and DequantizeLinear around products of floating-point numbers (QuantFormat.QDQ)"
            )
    return ""


def _quantize(call: Call, values: Values, shape: Shape) -> Tensor:
    values = _without_blocks(call, values, shape)
    x, along = values[0].float, _axis(call, shape)
    if not all(value.constant for value in values[1:] if value.present):
        raise call.refuse("its scale or its zero point depends on the input")
    return _rounded(call, x / _parameter(call, values[1], x, len(shape), along), optional(values, 2), along)


def _without_blocks(call: Call, values: Values, shape: Shape) -> Values:
    """Return the values with a scale and a zero point for each entry, where they are given for blocks of entries."""
    size = int(call.attributes.get("block_size", 0))
    if not size:
        return values
    place, found = int(call.attributes.get("axis", 1)) % len(shape), list(values)
    for index, value in enumerate(values[1:], 1):
        if value.present:
            if value.array is None:
                raise call.refuse("its scales of blocks depend on the input")
            array = np.repeat(value.array, size, axis=place).take(range(shape[place]), axis=place)
            found[index] = Value(array.shape, None, array)
    return found


def _dequantize(call: Call, values: Values, shape: Shape) -> Tensor:
    values = _without_blocks(call, values, shape)
    like, along = _like(values), _axis(call, shape)
    x = _centred(call, values[0], optional(values, 2), like, along)
    return x.float * _parameter(call, values[1], like, len(shape), along)


def _dynamic(call: Call, values: Values, shape: Shape) -> list[Tensor]:
    """Return the entries as whole numbers from 0 to 255, their scale and their zero point, which are one each."""
    x = by_instance(values[0].float)
    least, largest = x.amin(dim=1, keepdim=True).clamp(max=0.0), x.amax(dim=1, keepdim=True).clamp(min=0.0)
    scale = (largest - least) / LEVELS
    zero = torch.round((-least / scale).clamp(0.0, LEVELS))
    numbers = (torch.round(x / scale) + zero).clamp(0.0, LEVELS)
    return [numbers.reshape(-1, *shape), scale.reshape(-1), zero.reshape(-1)]


def _integer_product(call: Call, values: Values, shape: Shape) -> Tensor:
    left = _centred(call, values[0], optional(values, 2), _like(values), (-1, 1))
    right = _centred(call, values[1], optional(values, 3), _like(values), (-1,))
    return matrix_product(call, [left, right], shape)


def _integer_convolution(call: Call, values: Values, shape: Shape) -> Tensor:
    x = _centred(call, values[0], optional(values, 2), _like(values), ())
    kernel = _centred(call, values[1], optional(values, 3), _like(values), _channels(values[1]))
    return convolution(call, [x, kernel], shape)


def _quantised_product(call: Call, values: Values, shape: Shape) -> Tensor:
    """Multiply matrices of whole numbers with their scales, and round again."""
    left, scale, zero, right, other_scale, other_zero, to_scale, to_zero = values
    like, rank = _like(values), len(shape)
    x = _centred(call, left, zero, like, (-1, 1))
    y = _centred(call, right, other_zero, like, (-1,))
    units = _parameter(call, scale, like, rank, (-1, 1)) * _parameter(call, other_scale, like, rank, (-1,))
    # One factor, as onnxruntime has it: products of whole numbers are often in the middle of two.
    units = units / _parameter(call, to_scale, like, rank, (-1, 1))
    return _rounded(call, matrix_product(call, [x, y], shape) * units, to_zero, (-1, 1))


def _quantised_convolution(call: Call, values: Values, shape: Shape) -> Tensor:
    """Convolve whole numbers with their scales, and round again; a bias is in units of both scales."""
    left, scale, zero, kernel, other_scale, other_zero, to_scale, to_zero = values[:8]
    like, channels, bias = _like(values), _channels(kernel), optional(values, 8)
    given = [_centred(call, left, zero, like, ()), _centred(call, kernel, other_zero, like, channels)]
    if bias is not None:
        given.append(Value(bias.shape, _numbers(bias, like), bias.array))
    rank, along = len(shape), channels[:-1]
    units = _parameter(call, scale, like, rank, ()) * _parameter(call, other_scale, like, rank, along)
    units = units / _parameter(call, to_scale, like, rank, ())
    return _rounded(call, convolution(call, given, shape) * units, to_zero, ())


def _like(values: Values) -> Tensor:
    """Return a value that depends on the input, of the type and on the device of all."""
    return next(value.float for value in values if value.present and not value.constant)


def _axis(call: Call, shape: Shape) -> tuple[int, ...]:
    """Return how scales of ``axis`` broadcast; those of blocks have the shape of the value already."""
    if call.attributes.get("block_size", 0):
        return tuple(shape)
    place = int(call.attributes.get("axis", 1)) % max(len(shape), 1)
    return tuple(-1 if index == place else 1 for index in range(len(shape)))


def _channels(kernel: Value) -> tuple[int, ...]:
    return (-1, *(1 for _ in kernel.shape[1:]))


def _numbers(value: Value, like: Tensor) -> Tensor:
    """Return a value of any type as floating-point numbers."""
    if value.tensor is not None:
        return value.tensor
    assert value.array is not None
    return torch.from_numpy(np.asarray(value.array.astype(np.float64))).to(like)


def _parameter(call: Call, value: Value, like: Tensor, rank: int, along: tuple[int, ...]) -> Tensor:
    """Return a scale or zero point as it broadcasts with values of so many dimensions, along one if several."""
    found = _numbers(value, like)
    if not value.constant:
        if any(length != 1 for length in value.shape):
            raise call.refuse("its scales depend on the input, and they are several")
        return found.reshape(-1, *(1,) * rank)
    return found.reshape(()) if found.numel() == 1 else found.reshape(along)


def _centred(call: Call, value: Value, zero: Value | None, like: Tensor, along: tuple[int, ...]) -> Value:
    """Return whole numbers less their zero point."""
    found = _numbers(value, like)
    if zero is not None:
        found = found - _parameter(call, zero, like, len(value.shape), along)
    return Value(value.shape, found, value.array)


def _rounded(call: Call, x: Tensor, zero: Value | None, along: tuple[int, ...]) -> Tensor:
    """Return the whole numbers nearest to a value in units of its scale, between the ends of their type."""
    ends = _kind(call, zero)
    moved = torch.round(x)
    if zero is not None:
        moved = moved + _parameter(call, zero, x, 0, along)
    return moved.clamp(float(ends.min), float(ends.max))


def _kind(call: Call, zero: Value | None) -> np.iinfo:
    if zero is not None and zero.array is not None:
        kind = zero.array.dtype
    elif zero is not None:
        raise call.refuse("its zero point depends on the input")
    else:
        given = int(call.attributes.get("output_dtype", 0))
        kind = np.dtype(np.uint8) if not given else helper.tensor_dtype_to_np_dtype(given)
    if kind not in (np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int16), np.dtype(np.uint16)):
        raise call.refuse(f"it gives {kind}; whole numbers of 8 or 16 bits are supported")
    return np.iinfo(kind)


CONVERTERS: Mapping[str, Converter] = {
    "ConvInteger": _integer_convolution,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic,
    "MatMulInteger": _integer_product,
    "QLinearConv": _quantised_convolution,
    "QLinearMatMul": _quantised_product,
    "QuantizeLinear": _quantize,
}
