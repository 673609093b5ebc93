"""Converters of quantisation: whole numbers between two ends, and back. What is rounded is a floor, with both sides of
its ties.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from onnx import helper
from torch import Tensor

from service.bounds.operators.onnx import Call, Converter, Shape, Value, Values, optional


def quantize(call: Call, values: Values, shape: Shape) -> Tensor:
    x = values[0].float
    scale, zero = _parameters(call, values, shape)
    kind = _kind(call, values)
    return (torch.round(x / scale) + zero).clamp(float(kind.min), float(kind.max))


def dequantize(call: Call, values: Values, shape: Shape) -> Tensor:
    scale, zero = _parameters(call, values, shape)
    return (values[0].float - zero) * scale


def _parameters(call: Call, values: Values, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, as they broadcast."""
    scale, zero = values[1], optional(values, 2)
    if scale.array is None or (zero is not None and zero.array is None):
        raise call.refuse("its scale or its zero point depends on the input")
    if call.attributes.get("block_size", 0):
        raise call.refuse("blocks of scales are not supported")
    like = scale.float
    array = np.zeros((), np.float64) if zero is None or zero.array is None else zero.array.astype(np.float64)
    zeros = torch.from_numpy(np.asarray(array)).to(like)
    return _along(call, scale.float, shape), _along(call, zeros, shape)


def _along(call: Call, parameter: Tensor, shape: Shape) -> Tensor:
    if parameter.numel() == 1:
        return parameter.reshape(())
    place = int(call.attributes.get("axis", 1)) % len(shape)
    return parameter.reshape([-1 if index == place else 1 for index in range(len(shape))])


def _kind(call: Call, values: Values) -> np.iinfo:
    zero: Value | None = optional(values, 2)
    if zero is not None and zero.array is not None:
        kind = zero.array.dtype
    else:
        given = int(call.attributes.get("output_dtype", 0))
        kind = np.dtype(np.uint8) if not given else helper.tensor_dtype_to_np_dtype(given)
    if kind not in (np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int16), np.dtype(np.uint16)):
        raise call.refuse(f"it gives {kind}; whole numbers of 8 or 16 bits are supported")
    return np.iinfo(kind)


CONVERTERS: Mapping[str, Converter] = {"DequantizeLinear": dequantize, "QuantizeLinear": quantize}
