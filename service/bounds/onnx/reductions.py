"""Converters of operators that reduce dimensions, or normalise over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.operators.onnx import Call, Converter, Shape, Values, axis, integers


def total(function: Callable[..., Tensor]) -> Converter:
    def convert(call: Call, values: Values, shape: Shape) -> Tensor:
        rank = len(values[0].shape)
        axes = integers(call, values, 1, "axes")
        if not axes and call.attributes.get("noop_with_empty_axes", 0):
            return values[0].float
        dims = [axis(given, rank) for given in (axes or range(rank))]
        return function(values[0].float, dim=dims, keepdim=bool(call.attributes.get("keepdims", 1)))

    return convert


def extreme(largest: bool) -> Converter:
    reduced = torch.amax if largest else torch.amin
    return total(lambda x, dim, keepdim: reduced(x, dim=dim, keepdim=keepdim))


def softmax(call: Call, values: Values, shape: Shape) -> Tensor:
    """Convert softmax, which before opset 13 goes over all dimensions from the axis on."""
    x, rank = values[0].float, len(shape)
    given = call.attributes.get("axis", -1 if call.opset >= 13 else 1)
    if call.opset >= 13 or given % rank == rank - 1:
        return torch.softmax(x, dim=axis(given, rank))
    kept = shape[: given % rank]
    return torch.softmax(x.reshape(-1, *kept, torch.Size(shape[given % rank :]).numel()), dim=-1).reshape(-1, *shape)


def log_softmax(call: Call, values: Values, shape: Shape) -> Tensor:
    if call.opset < 13 and call.attributes.get("axis", 1) % len(shape) != len(shape) - 1:
        raise call.refuse("over several dimensions, as before opset 13; the last one is supported")
    return functional.log_softmax(values[0].float, dim=axis(call.attributes.get("axis", -1), len(shape)))


def running_sum(call: Call, values: Values, shape: Shape) -> Tensor:
    dim = axis((integers(call, values, 1, "axis") or [0])[0], len(shape))
    x, exclusive = values[0].float, int(call.attributes.get("exclusive", 0))
    if not exclusive and not call.attributes.get("reverse", 0):
        return x.cumsum(dim)
    summed = torch.ones(shape[dim - 1], shape[dim - 1], dtype=x.dtype, device=x.device).triu(exclusive)
    matrix = summed.mT if call.attributes.get("reverse", 0) else summed
    return torch.matmul(x.movedim(dim, -1), matrix).movedim(-1, dim)


def product(x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    for each in sorted(dim, reverse=True):
        x = x.prod(dim=each, keepdim=keepdim)
    return x


CONVERTERS: Mapping[str, Converter] = {
    "CumSum": running_sum,
    "LogSoftmax": log_softmax,
    "ReduceL1": total(lambda x, dim, keepdim: x.abs().sum(dim=dim, keepdim=keepdim)),
    "ReduceL2": total(lambda x, dim, keepdim: x.square().sum(dim=dim, keepdim=keepdim).sqrt()),
    "ReduceLogSum": total(lambda x, dim, keepdim: x.sum(dim=dim, keepdim=keepdim).log()),
    "ReduceLogSumExp": total(torch.logsumexp),
    "ReduceMax": extreme(True),
    "ReduceMean": total(torch.mean),
    "ReduceMin": extreme(False),
    "ReduceProd": total(product),
    "ReduceSum": total(torch.sum),
    "ReduceSumSquare": total(lambda x, dim, keepdim: x.square().sum(dim=dim, keepdim=keepdim)),
    "Softmax": softmax,
}
