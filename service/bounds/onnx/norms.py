"""Converters of normalisations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.operators.onnx import Call, Converter, Shape, Values, axis


def batch_norm(call: Call, values: Values, shape: Shape) -> Tensor:
    if call.attributes.get("training_mode", 0) or not all(value.constant for value in values[1:]):
        raise call.refuse("only constant statistics are supported")
    scale, bias, mean, variance = (value.float for value in values[1:5])
    factor = scale * torch.rsqrt(variance + float(call.attributes.get("epsilon", 1e-5)))
    trailing = [1] * (len(shape) - 2)
    return values[0].float * factor.reshape(-1, *trailing) + (bias - mean * factor).reshape(-1, *trailing)


def instance_norm(call: Call, values: Values, shape: Shape) -> Tensor:
    """Normalise each instance of images ``(1, channels, …)``."""
    if shape[0] != 1 or not all(value.constant for value in values[1:]):
        raise call.refuse(f"a batch of {shape[0]} in one instance, or a scale that depends on the input")
    x = values[0].float.reshape(-1, *shape[1:])
    scale, bias, eps = values[1].float, values[2].float, float(call.attributes.get("epsilon", 1e-5))
    return functional.instance_norm(x, weight=scale, bias=bias, eps=eps).reshape(-1, *shape)


def layer_norm(call: Call, values: Values, shape: Shape) -> list[Tensor]:
    """Normalise over the last dimensions. The mean and the inverse deviation are given too where they have names."""
    first = call.attributes.get("axis", -1) % len(shape)
    over, x, eps = shape[first:], values[0].float, float(call.attributes.get("epsilon", 1e-5))
    weight, bias = ([value.float.expand(over) for value in values[1:3]] + [None, None])[:2]
    found = [functional.layer_norm(x, over, weight, bias, eps)]
    if any(call.outputs[1:]):
        along = list(range(first + 1, len(shape) + 1))
        mean = x.mean(along, keepdim=True)
        found += [mean, torch.rsqrt((x - mean).square().mean(along, keepdim=True) + eps)]
    return found


def rms_norm(call: Call, values: Values, shape: Shape) -> Tensor:
    first = call.attributes.get("axis", -1) % len(shape)
    weight = values[1].float.expand(shape[first:])
    return functional.rms_norm(values[0].float, shape[first:], weight, float(call.attributes.get("epsilon", 1e-5)))


def group_norm(call: Call, values: Values, shape: Shape) -> Tensor:
    """Normalise groups of images ``(1, channels, …)``; scale and bias are of the groups before opset 21, then of the
    channels.
    """
    groups, eps = int(call.attributes["num_groups"]), float(call.attributes.get("epsilon", 1e-5))
    if shape[0] != 1 or not all(value.constant for value in values[1:]):
        raise call.refuse(f"a batch of {shape[0]} in one instance, or a scale that depends on the input")
    repeats = shape[1] // values[1].shape[0]
    scale, bias = (value.float.repeat_interleave(repeats) for value in values[1:3])
    x = values[0].float.reshape(-1, *shape[1:])
    return functional.group_norm(x, groups, scale, bias, eps).reshape(-1, *shape)


def unit_length(call: Call, values: Values, shape: Shape) -> Tensor:
    """``LpNormalization``."""
    p, dim = int(call.attributes.get("p", 2)), axis(int(call.attributes.get("axis", -1)), len(shape))
    return functional.normalize(values[0].float, p, dim)


def local_response(call: Call, values: Values, shape: Shape) -> Tensor:
    """``LRN``: squares of the channels nearby, summed by a banded matrix."""
    size, x = int(call.attributes["size"]), values[0].float.reshape(-1, *shape)
    alpha, beta = float(call.attributes.get("alpha", 1e-4)), float(call.attributes.get("beta", 0.75))
    channel = torch.arange(shape[1], device=x.device)
    away = channel[None, :] - channel[:, None]
    near = ((away >= -((size - 1) // 2)) & (away <= size // 2)).to(x.dtype)
    nearby = torch.matmul(near, x.square().flatten(3 if len(shape) > 2 else 2)).reshape(x.shape)
    return x * torch.pow(float(call.attributes.get("bias", 1.0)) + alpha / size * nearby, -beta)


CONVERTERS: Mapping[str, Converter] = {
    "BatchNormalization": batch_norm,
    "GroupNormalization": group_norm,
    "InstanceNormalization": instance_norm,
    "LRN": local_response,
    "LayerNormalization": layer_norm,
    "LpNormalization": unit_length,
    "RMSNormalization": rms_norm,
}
