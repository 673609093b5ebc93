"""Converters of operators that reduce dimensions, or normalise over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.operators.conversion import Call, Converter, Shape, Values, axis, integers, optional, repeated


def _total(function: Callable[..., Tensor], of_one: Callable[[Tensor], Tensor] = lambda x: x) -> Converter:
    """Return the converter of a reduction; ``of_one`` is that of one number, where no dimension is reduced."""

    def convert(call: Call, values: Values, shape: Shape) -> Tensor:
        rank = len(values[0].shape)
        axes = integers(call, values, 1, "axes")
        if not rank or (not axes and call.attributes.get("noop_with_empty_axes", 0)):
            return of_one(values[0].float)
        dims = [axis(given, rank) for given in (axes or range(rank))]
        return function(values[0].float, dim=dims, keepdim=bool(call.attributes.get("keepdims", 1)))

    return convert


def along_axis(function: Callable[[Tensor, int], Tensor]) -> Callable[[Call, Values, Shape], Tensor]:
    """Return the converter of a function ``(x, dimension)`` along an axis, which before opset 13 is over all dimensions
    from the axis on.
    """

    def convert(call: Call, values: Values, shape: Shape) -> Tensor:
        x, rank = values[0].float, len(shape)
        given = int(call.attributes.get("axis", -1 if call.opset >= 13 else 1))
        if call.opset >= 13 or given % rank == rank - 1:
            return function(x, axis(given, rank))
        kept = shape[: given % rank]
        flat = x.reshape(-1, *kept, torch.Size(shape[given % rank :]).numel())
        return function(flat, flat.dim() - 1).reshape(-1, *shape)

    return convert


def _running_sum(call: Call, values: Values, shape: Shape) -> Tensor:
    dim = axis((integers(call, values, 1, "axis") or [0])[0], len(shape))
    x, exclusive = values[0].float, int(call.attributes.get("exclusive", 0))
    if not exclusive and not call.attributes.get("reverse", 0):
        return x.cumsum(dim)
    summed = torch.ones(shape[dim - 1], shape[dim - 1], dtype=x.dtype, device=x.device).triu(exclusive)
    matrix = summed.mT if call.attributes.get("reverse", 0) else summed
    return torch.matmul(x.movedim(dim, -1), matrix).movedim(-1, dim)


def _product(x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    for each in sorted(dim, reverse=True):
        x = x.prod(dim=each, keepdim=keepdim)
    return x


def _batch_norm(call: Call, values: Values, shape: Shape) -> Tensor:
    if call.attributes.get("training_mode", 0) or not all(value.constant for value in values[1:]):
        raise call.refuse("only constant statistics are supported")
    scale, bias, mean, variance = (value.float for value in values[1:5])
    factor = scale * torch.rsqrt(variance + float(call.attributes.get("epsilon", 1e-5)))
    trailing = [1] * (len(shape) - 2)
    return values[0].float * factor.reshape(-1, *trailing) + (bias - mean * factor).reshape(-1, *trailing)


def _instance_norm(call: Call, values: Values, shape: Shape) -> Tensor:
    """Normalise each channel of images ``(batch, channels, …)``: those of a batch are channels of one."""
    if not all(value.constant for value in values[1:]):
        raise call.refuse("its scale or its bias depends on the input")
    x, eps = values[0].float.reshape(-1, shape[0] * shape[1], *shape[2:]), float(call.attributes.get("epsilon", 1e-5))
    scale, bias = (repeated(value, shape[0]) for value in values[1:3])
    return functional.instance_norm(x, weight=scale, bias=bias, eps=eps).reshape(-1, *shape)


def _layer_norm(call: Call, values: Values, shape: Shape) -> list[Tensor]:
    """Normalise over the last dimensions. The mean and the inverse deviation are given too where they have names."""
    first = call.attributes.get("axis", -1) % len(shape)
    over, x, eps = shape[first:], values[0].float, float(call.attributes.get("epsilon", 1e-5))
    weight, bias = values[1].float.expand(over), optional(values, 2)
    found = [functional.layer_norm(x, over, weight, None if bias is None else bias.float.expand(over), eps)]
    if any(call.outputs[1:]):
        along = list(range(first + 1, len(shape) + 1))
        mean = x.mean(along, keepdim=True)
        found += [mean, torch.rsqrt((x - mean).square().mean(along, keepdim=True) + eps)]
    return found


def _rms_norm(call: Call, values: Values, shape: Shape) -> Tensor:
    first = call.attributes.get("axis", -1) % len(shape)
    weight = values[1].float.expand(shape[first:])
    return functional.rms_norm(values[0].float, shape[first:], weight, float(call.attributes.get("epsilon", 1e-5)))


def _group_norm(call: Call, values: Values, shape: Shape) -> Tensor:
    """Normalise groups of channels of images ``(batch, channels, …)``; scale and bias are per group before opset 21,
    then per channel.
    """
    groups, eps = int(call.attributes["num_groups"]), float(call.attributes.get("epsilon", 1e-5))
    if not all(value.constant for value in values[1:]):
        raise call.refuse("its scale or its bias depends on the input")
    repeats = shape[1] // values[1].shape[0]
    scale, bias = (repeated(value, shape[0]).repeat_interleave(repeats) for value in values[1:3])
    x = values[0].float.reshape(-1, shape[0] * shape[1], *shape[2:])
    return functional.group_norm(x, groups * shape[0], scale, bias, eps).reshape(-1, *shape)


def _unit_length(call: Call, values: Values, shape: Shape) -> Tensor:
    """``LpNormalization``."""
    p, dim = int(call.attributes.get("p", 2)), axis(int(call.attributes.get("axis", -1)), len(shape))
    return functional.normalize(values[0].float, p, dim)


def _mean_variance(call: Call, values: Values, shape: Shape) -> Tensor:
    """Normalise as onnxruntime does, without the tiny number of ONNX's definition: what is constant becomes NaN."""
    dims = [axis(int(given), len(shape)) for given in call.attributes.get("axes", (0, 2, 3))]
    centred = values[0].float - values[0].float.mean(dim=dims, keepdim=True)
    return centred / centred.square().mean(dim=dims, keepdim=True).sqrt()


def _local_response(call: Call, values: Values, shape: Shape) -> Tensor:
    """``LRN`` of images ``(batch, channels, …)``: squares of the channels nearby, summed by a banded matrix."""
    size, x = int(call.attributes["size"]), values[0].float.reshape(-1, *shape)
    alpha, beta = float(call.attributes.get("alpha", 1e-4)), float(call.attributes.get("beta", 0.75))
    channel = torch.arange(shape[1], device=x.device)
    away = channel[None, :] - channel[:, None]
    near = ((away >= -((size - 1) // 2)) & (away <= size // 2)).to(x.dtype)
    nearby = torch.matmul(near, x.square().flatten(3)).reshape(x.shape)
    return x * torch.pow(float(call.attributes.get("bias", 1.0)) + alpha / size * nearby, -beta)


CONVERTERS: Mapping[str, Converter] = {
    "BatchNormalization": _batch_norm,
    "CumSum": _running_sum,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LRN": _local_response,
    "LayerNormalization": _layer_norm,
    "LogSoftmax": along_axis(functional.log_softmax),
    "LpNormalization": _unit_length,
    "MeanVarianceNormalization": _mean_variance,
    "RMSNormalization": _rms_norm,
    "ReduceL1": _total(lambda x, dim, keepdim: x.abs().sum(dim=dim, keepdim=keepdim), torch.abs),
    "ReduceL2": _total(lambda x, dim, keepdim: x.square().sum(dim=dim, keepdim=keepdim).sqrt(), torch.abs),
    "ReduceLogSum": _total(lambda x, dim, keepdim: x.sum(dim=dim, keepdim=keepdim).log(), torch.log),
    "ReduceLogSumExp": _total(torch.logsumexp),
    "ReduceMax": _total(torch.amax),
    "ReduceMean": _total(torch.mean),
    "ReduceMin": _total(torch.amin),
    "ReduceProd": _total(_product),
    "ReduceSum": _total(torch.sum),
    "ReduceSumSquare": _total(lambda x, dim, keepdim: x.square().sum(dim=dim, keepdim=keepdim), torch.square),
    "Softmax": along_axis(torch.softmax),
}
