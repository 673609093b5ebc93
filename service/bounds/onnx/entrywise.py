"""Converters of entrywise operators, with broadcasting where there are several values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.onnx.reading import Call
from service.bounds.onnx.values import Converter, Shape, Value, Values, aligned, number, single


def entrywise(function: Callable[[Tensor], Tensor]) -> Converter:
    return lambda call, values, shape: function(values[0].float)


def of_two(function: Callable[[Tensor, Tensor], Tensor]) -> Converter:
    """Entrywise, with broadcasting; of more than two values in a row."""
    return lambda call, values, shape: reduce(function, aligned(values))


def same(call: Call, values: Values, shape: Shape) -> Tensor:
    return values[0].float


def mean_of(call: Call, values: Values, shape: Shape) -> Tensor:
    return reduce(torch.add, aligned(values)) / len(values)


def cast(call: Call, values: Values, shape: Shape) -> Tensor:
    if call.attributes["to"] not in (1, 10, 11, 16):
        raise call.refuse("a cast to another type than a floating-point one")
    return values[0].float


def leaky_relu(call: Call, values: Values, shape: Shape) -> Tensor:
    return functional.leaky_relu(values[0].float, float(call.attributes.get("alpha", 0.01)))


def prelu(call: Call, values: Values, shape: Shape) -> Tensor:
    x, slope = aligned(values)
    return slope * x + (1 - slope) * torch.relu(x)  # one ReLU: nothing is lost


def elu(call: Call, values: Values, shape: Shape) -> Tensor:
    return functional.elu(values[0].float, float(call.attributes.get("alpha", 1.0)))


def celu(call: Call, values: Values, shape: Shape) -> Tensor:
    return functional.celu(values[0].float, float(call.attributes.get("alpha", 1.0)))


def selu(call: Call, values: Values, shape: Shape) -> Tensor:
    alpha = float(call.attributes.get("alpha", 1.67326319217681884765625))
    return functional.elu(values[0].float, alpha) * float(call.attributes.get("gamma", 1.05070102214813232421875))


def hard_sigmoid(call: Call, values: Values, shape: Shape) -> Tensor:
    slope, middle = float(call.attributes.get("alpha", 0.2)), float(call.attributes.get("beta", 0.5))
    return (slope * values[0].float + middle).clamp(0, 1)


def gelu(call: Call, values: Values, shape: Shape) -> Tensor:
    return functional.gelu(values[0].float, approximate=call.attributes.get("approximate", "none"))


def clip(call: Call, values: Values, shape: Shape) -> Tensor:
    lowest, highest = number(call, values, 1, "min"), number(call, values, 2, "max")
    x = values[0].float
    return x if lowest is None and highest is None else x.clamp(lowest, highest)


def power(call: Call, values: Values, shape: Shape) -> Tensor:
    base, exponent = values
    if not exponent.constant:
        raise call.refuse("its exponent depends on the input")
    return torch.pow(base.float, single(call, exponent, "exponent"))


def where(call: Call, values: Values, shape: Shape) -> Tensor:
    condition, yes, no = values
    if condition.array is None:
        raise call.refuse("its condition depends on the input")
    rank = len(shape)
    mask = torch.tensor(condition.array.reshape((1,) * (rank - condition.array.ndim) + condition.array.shape))
    first, second = aligned([yes, no, Value(shape, None, condition.array)][:2])
    return torch.where(mask.to(first.device), first, second)


def shrink(call: Call, values: Values, shape: Shape) -> Tensor:
    """Only where it has no jump."""
    at, bias = float(call.attributes.get("lambd", 0.5)), float(call.attributes.get("bias", 0.0))
    if at != bias:
        raise call.refuse(f"lambd {at} and bias {bias}: it jumps; the same number twice is supported")
    x = values[0].float
    return torch.relu(x - at) - torch.relu(-x - at)


CONVERTERS: Mapping[str, Converter] = {
    "Abs": entrywise(torch.abs),
    "Add": of_two(torch.add),
    "Atan": entrywise(torch.atan),
    "Cast": cast,
    "Ceil": entrywise(torch.ceil),
    "Celu": celu,
    "Clip": clip,
    "Cos": entrywise(torch.cos),
    "Cosh": entrywise(torch.cosh),
    "Div": of_two(torch.div),
    "Dropout": same,
    "Elu": elu,
    "Erf": entrywise(torch.erf),
    "Exp": entrywise(torch.exp),
    "Floor": entrywise(torch.floor),
    "Gelu": gelu,
    "HardSigmoid": hard_sigmoid,
    "HardSwish": entrywise(functional.hardswish),
    "Identity": same,
    "LeakyRelu": leaky_relu,
    "Log": entrywise(torch.log),
    "Max": of_two(torch.maximum),
    "Mean": mean_of,
    "Min": of_two(torch.minimum),
    "Mish": entrywise(functional.mish),
    "Mul": of_two(torch.mul),
    "Neg": entrywise(torch.neg),
    "PRelu": prelu,
    "Pow": power,
    "Reciprocal": entrywise(torch.reciprocal),
    "Relu": entrywise(torch.relu),
    "Round": entrywise(torch.round),
    "Selu": selu,
    "Shrink": shrink,
    "Sigmoid": entrywise(torch.sigmoid),
    "Sin": entrywise(torch.sin),
    "Sinh": entrywise(torch.sinh),
    "Softplus": entrywise(lambda x: functional.softplus(x, threshold=80.0)),
    "Softsign": entrywise(lambda x: x / (1 + x.abs())),
    "Sqrt": entrywise(torch.sqrt),
    "Sub": of_two(torch.sub),
    "Sum": of_two(torch.add),
    "Tan": entrywise(lambda x: x.sin() / x.cos()),
    "Tanh": entrywise(torch.tanh),
    "Where": where,
}
