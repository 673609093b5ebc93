"""Converters of entrywise ONNX operators that are written by means of others; the others declare their own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import pi

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor
from torch.nn import functional

from service.bounds.onnx.logic import positive
from service.bounds.onnx.whole_numbers import TYPES, WHOLE
from service.bounds.operators.conversion import Call, Converter, Shape, Values, aligned, entrywise, number, of_two
from service.bounds.operators.where import chosen


def _same(call: Call, values: Values, shape: Shape) -> Tensor:
    return values[0].float


def _mean_of(call: Call, values: Values, shape: Shape) -> Tensor:
    return reduce(torch.add, aligned(values)) / len(values)


def _cast(call: Call, values: Values, shape: Shape) -> Tensor:
    """Convert a cast between floating-point types, or of a truth, which is a number here, to them and back; one to
    integers cuts off what is behind the point.
    """
    kind, is_truth = call.attributes["to"], call.attributes["to"] == TensorProto.BOOL
    if is_truth:
        x = values[0].float
        return positive(x) + positive(-x)
    x = values[0].float
    if kind in TYPES:
        cut = x if WHOLE in call.attributes else torch.floor(torch.relu(x)) - torch.floor(torch.relu(-x))
        return _within_type(x, cut, 2.0 ** (TYPES[kind] - 1))
    if kind not in (1, 10, 11, 16):
        expected = "a floating-point type, INT32 or INT64, or a Clip to the numbers of its type before it"
        raise call.refuse(f"a cast to integers that wrap around; expected {expected}")
    return x


def _within_type(x: Tensor, cut: Tensor, end: float) -> Tensor:
    """Return the whole numbers, or the least of an integer type where a value is not within it, below ``end``, or is no
    number: what x86 processors give.
    """
    least = torch.full((), -end, dtype=x.dtype, device=x.device)
    before = float(np.nextafter(np.array(-end, np.float64 if x.dtype == torch.float64 else np.float32), -np.inf))
    return chosen(end - x, chosen(x - before, cut, least), least)


def _prelu(call: Call, values: Values, shape: Shape) -> Tensor:
    x, slope = aligned(values)
    return slope * x + (1 - slope) * torch.relu(x)  # one ReLU: nothing is lost


def _celu(call: Call, values: Values, shape: Shape) -> Tensor:
    return functional.celu(values[0].float, float(call.attributes.get("alpha", 1.0)))


def _swish(call: Call, values: Values, shape: Shape) -> Tensor:
    x = values[0].float
    return x * torch.sigmoid(float(call.attributes.get("alpha", 1.0)) * x)


def _selu(call: Call, values: Values, shape: Shape) -> Tensor:
    alpha = float(call.attributes.get("alpha", 1.67326319217681884765625))
    return functional.elu(values[0].float, alpha) * float(call.attributes.get("gamma", 1.05070102214813232421875))


def _hard_sigmoid(call: Call, values: Values, shape: Shape) -> Tensor:
    slope, middle = float(call.attributes.get("alpha", 0.2)), float(call.attributes.get("beta", 0.5))
    return (slope * values[0].float + middle).clamp(0, 1)


def _clip(call: Call, values: Values, shape: Shape) -> Tensor:
    lowest, highest = number(call, values, 1, "min"), number(call, values, 2, "max")
    x = values[0].float
    return x if lowest is None and highest is None else x.clamp(lowest, highest)


def _shrink(call: Call, values: Values, shape: Shape) -> Tensor:
    """Return the operator as two ReLUs, where it has no jump."""
    at, bias = float(call.attributes.get("lambd", 0.5)), float(call.attributes.get("bias", 0.0))
    x = values[0].float
    if at == bias >= 0:
        return torch.relu(x - at) - torch.relu(-x - at)
    return chosen(-x - at, x + bias, chosen(x - at, x - bias, _zero(x)))


def _thresholded_relu(call: Call, values: Values, shape: Shape) -> Tensor:
    x = values[0].float
    return chosen(x - float(call.attributes.get("alpha", 1.0)), x, _zero(x))


def _remainder(call: Call, values: Values, shape: Shape) -> Tensor:
    """Return the remainder of a truncating division by a constant."""
    if values[1].array is None or not call.attributes.get("fmod", 0):
        raise call.refuse("its divisor depends on the input, or fmod is 0")
    x, divisor = aligned(values)
    times = x / divisor
    return x - divisor * (torch.floor(torch.relu(times)) - torch.floor(torch.relu(-times)))


def _arc_sine(x: Tensor) -> Tensor:
    """Return the angle by its half, whose tangent is finite at both ends."""
    return 2 * torch.atan(x / (1 + ((1 - x) * (1 + x)).sqrt()))


def _zero(like: Tensor) -> Tensor:
    return torch.full((), 0.0, dtype=like.dtype, device=like.device)


CONVERTERS: Mapping[str, Converter] = {
    "Acos": entrywise(lambda x: pi / 2 - _arc_sine(x)),
    "Acosh": entrywise(lambda x: (x + (x - 1).sqrt() * (x + 1).sqrt()).log()),
    "Asin": entrywise(_arc_sine),
    "Atanh": entrywise(lambda x: ((1 + x).log() - (1 - x).log()) / 2),
    "Cast": _cast,
    "Ceil": entrywise(torch.ceil),
    "Celu": _celu,
    "Clip": _clip,
    "Cosh": entrywise(torch.cosh),
    "Dropout": _same,
    "HardSigmoid": _hard_sigmoid,
    "Identity": _same,
    "Mean": _mean_of,
    "Min": of_two(torch.minimum),
    "Mod": _remainder,
    "PRelu": _prelu,
    "Round": entrywise(torch.round),
    "Selu": _selu,
    "Shrink": _shrink,
    "Sinh": entrywise(torch.sinh),
    "Softsign": entrywise(lambda x: x / (1 + x.abs())),
    "Swish": _swish,
    "ThresholdedRelu": _thresholded_relu,
    "Tan": entrywise(lambda x: x.sin() / x.cos()),
}
