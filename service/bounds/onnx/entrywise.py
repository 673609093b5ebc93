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
from service.bounds.operators.choice import choose
from service.bounds.operators.conversion import Call, Converter, Shape, Values, aligned, entrywise, number, of_two


def _cast(call: Call, values: Values, shape: Shape) -> Tensor:
    """Convert a cast between floating-point types, or of a truth, which is a number here, to them and back; one to
    integers cuts off what is behind the point.
    """
    x, kind = values[0].float, call.attributes["to"]
    if kind == TensorProto.BOOL:
        return positive(x) + positive(-x)
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
    return choose(end - x, choose(x - before, cut, least), least)


def _clip(call: Call, values: Values, shape: Shape) -> Tensor:
    lowest, highest = number(call, values, 1, "min"), number(call, values, 2, "max")
    x = values[0].float
    return x if lowest is None and highest is None else x.clamp(lowest, highest)


def _shrink(x: Tensor, at: float, bias: float) -> Tensor:
    """Return the operator as two ReLUs, where it has no jump."""
    if at == bias >= 0:
        return torch.relu(x - at) - torch.relu(-x - at)
    return choose(-x - at, x + bias, choose(x - at, x - bias, _zero(x)))


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
    "Celu": entrywise(functional.celu, alpha=1.0),
    "Clip": _clip,
    "Cosh": entrywise(torch.cosh),
    "Dropout": entrywise(lambda x: x),
    "HardSigmoid": entrywise(lambda x, slope, middle: (slope * x + middle).clamp(0, 1), alpha=0.2, beta=0.5),
    "Identity": entrywise(lambda x: x),
    "Mean": lambda call, values, shape: reduce(torch.add, aligned(values)) / len(values),
    "Min": of_two(torch.minimum),
    "Mod": _remainder,
    "PRelu": of_two(lambda x, slope: slope * x + (1 - slope) * torch.relu(x)),  # one ReLU: nothing is lost
    "Round": entrywise(torch.round),
    "Selu": entrywise(
        lambda x, alpha, gamma: functional.elu(x, alpha) * gamma,
        alpha=1.67326319217681884765625,
        gamma=1.05070102214813232421875,
    ),
    "Shrink": entrywise(_shrink, lambd=0.5, bias=0.0),
    "Sinh": entrywise(torch.sinh),
    "Softsign": entrywise(lambda x: x / (1 + x.abs())),
    "Swish": entrywise(lambda x, alpha: x * torch.sigmoid(alpha * x), alpha=1.0),
    "ThresholdedRelu": entrywise(lambda x, alpha: choose(x - alpha, x, _zero(x)), alpha=1.0),
    "Tan": entrywise(lambda x: x.sin() / x.cos()),
}
