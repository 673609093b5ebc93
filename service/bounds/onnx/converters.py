"""ONNX operators in terms of torch: one small function each.

``(call, values, shape of the first output)`` to the output; ``values`` follow the node's inputs, at least one of
which depends on the model's input. :class:`UnsupportedModelError` names a node whose form is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.onnx import windows
from service.bounds.onnx.reading import Call
from service.bounds.onnx.values import Value, aligned, axis, batched, integers, number, single

Values = Sequence[Value]
Shape = tuple[int, ...]
Converter = Callable[[Call, Values, Shape], Tensor | list[Tensor]]


def entrywise(function: Callable[[Tensor], Tensor]) -> Converter:
    return lambda call, values, shape: function(values[0].float)


def of_two(function: Callable[[Tensor, Tensor], Tensor]) -> Converter:
    """Entrywise, with broadcasting; of more than two values in a row."""
    return lambda call, values, shape: reduce(function, aligned(values))


def same_entries(call: Call, values: Values, shape: Shape) -> Tensor:
    """Reshapes of every kind: the shape is known."""
    return values[0].float.reshape(-1, *shape)


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


def extreme(largest: bool) -> Converter:
    reduced = torch.amax if largest else torch.amin
    return total(lambda x, dim, keepdim: reduced(x, dim=dim, keepdim=keepdim))


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


def matrix_product(call: Call, values: Values, shape: Shape) -> Tensor:
    left, right = values
    if left.constant:
        if len(left.shape) == 1:
            raise call.refuse("a constant vector times a value; a constant matrix is supported")
        x = right.float if len(right.shape) > 1 else right.float.unsqueeze(-1)
        found = torch.matmul(x.transpose(-1, -2), left.float.transpose(-1, -2)).transpose(-1, -2)
        return found.reshape(-1, *shape)
    if right.constant:
        matrix = right.float if len(right.shape) > 1 else right.float.unsqueeze(-1)
        x, kept = left.float, max(len(matrix.shape) - len(left.shape), 0)
        if kept:
            x = x.reshape(-1, *(1,) * kept, *left.shape)
        return torch.matmul(x, matrix).reshape(-1, *shape)
    rank = max(len(left.shape), len(right.shape), 2)
    first = left.shape if len(left.shape) > 1 else (1, *left.shape)
    second = right.shape if len(right.shape) > 1 else (*right.shape, 1)
    x = left.float.reshape(-1, *(1,) * (rank - len(first)), *first)
    y = right.float.reshape(-1, *(1,) * (rank - len(second)), *second)
    return torch.matmul(x, y).reshape(-1, *shape)


def gemm(call: Call, values: Values, shape: Shape) -> Tensor:
    left, right = (
        _transposed(value) if call.attributes.get(name, 0) else value
        for value, name in zip(values[:2], ("transA", "transB"), strict=True)
    )
    alpha, beta = float(call.attributes.get("alpha", 1.0)), float(call.attributes.get("beta", 1.0))
    bias = values[2] if len(values) > 2 else None
    if right.constant and (bias is None or (bias.constant and bias.float.numel() == shape[-1])):
        weight = right.float.mT if alpha == 1 else right.float.mT * alpha
        vector = None if bias is None else bias.float.reshape(-1) * beta
        return functional.linear(left.float, weight, vector)
    found = matrix_product(call, [left, right], shape) * alpha
    if bias is None:
        return found
    first, second = aligned([Value(shape, found), bias])
    return first + second * beta


def _transposed(value: Value) -> Value:
    array = None if value.array is None else value.array.T
    return Value(value.shape[::-1], value.float.transpose(-1, -2), array)


def concatenate(call: Call, values: Values, shape: Shape) -> Tensor:
    batch = next(value.float.shape[0] for value in values if not value.constant)
    return torch.cat([batched(value, batch) for value in values], dim=axis(call.attributes["axis"], len(shape)))


def transpose(call: Call, values: Values, shape: Shape) -> Tensor:
    rank = len(values[0].shape)
    order = call.attributes.get("perm", list(range(rank))[::-1])
    return values[0].float.permute(0, *(position + 1 for position in order))


def expand(call: Call, values: Values, shape: Shape) -> Tensor:
    value = values[0]
    x = value.float.reshape(-1, *(1,) * (len(shape) - len(value.shape)), *value.shape)
    return x.expand(-1, *shape)


def slices(call: Call, values: Values, shape: Shape) -> Tensor:
    x, rank = values[0].float, len(values[0].shape)
    starts, ends = integers(call, values, 1, "starts"), integers(call, values, 2, "ends")
    if starts is None or ends is None:
        raise call.refuse("it has no starts or no ends")
    axes = integers(call, values, 3, "axes") or list(range(len(starts)))
    steps = integers(call, values, 4, "steps") or [1] * len(starts)
    for start, end, given, step in zip(starts, ends, axes, steps, strict=True):
        dim = axis(given, rank)
        chosen = range(x.shape[dim])[start:end:step]
        if step > 0:
            x = x[(slice(None),) * dim + (slice(chosen.start, chosen.stop, step),)]
        else:
            x = x.index_select(dim, torch.tensor(list(chosen), device=x.device))
    return x


def gather(call: Call, values: Values, shape: Shape) -> Tensor:
    data, indices = values
    if not indices.constant or data.constant:
        raise call.refuse("its indices depend on the input")
    dim = axis(call.attributes.get("axis", 0), len(data.shape))
    chosen = [index % data.shape[dim - 1] for index in indices.integers]
    return data.float.index_select(dim, torch.tensor(chosen, device=data.float.device)).reshape(-1, *shape)


def split(call: Call, values: Values, shape: Shape) -> list[Tensor]:
    x = values[0].float
    dim = axis(call.attributes.get("axis", 0), len(values[0].shape))
    lengths = integers(call, values, 1, "split")
    if lengths is None:
        share = -(-x.shape[dim] // len(call.outputs))
        lengths = [min(share, x.shape[dim] - share * index) for index in range(len(call.outputs))]
    return list(torch.split(x, lengths, dim=dim))


def pad(call: Call, values: Values, shape: Shape) -> Tensor:
    x, rank = values[0].float, len(values[0].shape)
    pads, mode = integers(call, values, 1, "pads"), call.attributes.get("mode", "constant")
    if pads is None or mode != "constant":
        raise call.refuse(f"mode {mode!r}; 'constant' is supported")
    axes = integers(call, values, 3, "axes") or list(range(rank))
    before, after = [0] * rank, [0] * rank
    for index, given in enumerate(axes):
        before[given % rank], after[given % rank] = pads[index], pads[index + len(axes)]
    widths = [width for each in reversed(range(rank)) for width in (before[each], after[each])]
    return functional.pad(x, widths, value=number(call, values, 2, "value") or 0.0)


def log_softmax(call: Call, values: Values, shape: Shape) -> Tensor:
    if call.opset < 13 and call.attributes.get("axis", 1) % len(shape) != len(shape) - 1:
        raise call.refuse("over several dimensions, as before opset 13; the last one is supported")
    return functional.log_softmax(values[0].float, dim=axis(call.attributes.get("axis", -1), len(shape)))


def running_sum(call: Call, values: Values, shape: Shape) -> Tensor:
    if call.attributes.get("exclusive", 0) or call.attributes.get("reverse", 0):
        raise call.refuse("exclusive and reverse are not supported")
    given = integers(call, values, 1, "axis") or [0]
    return values[0].float.cumsum(axis(given[0], len(shape)))


def instance_norm(call: Call, values: Values, shape: Shape) -> Tensor:
    """Of images ``(1, channels, …)``."""
    if shape[0] != 1 or not all(value.constant for value in values[1:]):
        raise call.refuse(f"a batch of {shape[0]} in one instance, or a scale that depends on the input")
    x = values[0].float.reshape(-1, *shape[1:])
    scale, bias, eps = values[1].float, values[2].float, float(call.attributes.get("epsilon", 1e-5))
    return functional.instance_norm(x, weight=scale, bias=bias, eps=eps).reshape(-1, *shape)


def total(function: Callable[..., Tensor]) -> Converter:
    def convert(call: Call, values: Values, shape: Shape) -> Tensor:
        rank = len(values[0].shape)
        axes = integers(call, values, 1, "axes")
        if not axes and call.attributes.get("noop_with_empty_axes", 0):
            return values[0].float
        dims = [axis(given, rank) for given in (axes or range(rank))]
        return function(values[0].float, dim=dims, keepdim=bool(call.attributes.get("keepdims", 1)))

    return convert


def softmax(call: Call, values: Values, shape: Shape) -> Tensor:
    """Before opset 13 over all dimensions from the axis on."""
    x, rank = values[0].float, len(shape)
    given = call.attributes.get("axis", -1 if call.opset >= 13 else 1)
    if call.opset >= 13 or given % rank == rank - 1:
        return torch.softmax(x, dim=axis(given, rank))
    kept = shape[: given % rank]
    return torch.softmax(x.reshape(-1, *kept, torch.Size(shape[given % rank :]).numel()), dim=-1).reshape(-1, *shape)


def batch_norm(call: Call, values: Values, shape: Shape) -> Tensor:
    if call.attributes.get("training_mode", 0) or not all(value.constant for value in values[1:]):
        raise call.refuse("only constant statistics are supported")
    scale, bias, mean, variance = (value.float for value in values[1:5])
    factor = scale * torch.rsqrt(variance + float(call.attributes.get("epsilon", 1e-5)))
    trailing = [1] * (len(shape) - 2)
    return values[0].float * factor.reshape(-1, *trailing) + (bias - mean * factor).reshape(-1, *trailing)


def layer_norm(call: Call, values: Values, shape: Shape) -> Tensor:
    over = shape[call.attributes.get("axis", -1) % len(shape) :]
    weight, bias = ([value.float.expand(over) for value in values[1:3]] + [None, None])[:2]
    return functional.layer_norm(values[0].float, over, weight, bias, float(call.attributes.get("epsilon", 1e-5)))


CONVERTERS: Mapping[str, Converter] = {
    "Abs": entrywise(torch.abs),
    "Add": of_two(torch.add),
    "Atan": entrywise(torch.atan),
    "AveragePool": windows.average_pool,
    "BatchNormalization": batch_norm,
    "Cast": cast,
    "Ceil": entrywise(torch.ceil),
    "Celu": celu,
    "Clip": clip,
    "Concat": concatenate,
    "Conv": windows.convolution,
    "ConvTranspose": windows.transposed_convolution,
    "Cos": entrywise(torch.cos),
    "Cosh": entrywise(torch.cosh),
    "CumSum": running_sum,
    "Div": of_two(torch.div),
    "Dropout": same,
    "Elu": elu,
    "Erf": entrywise(torch.erf),
    "Exp": entrywise(torch.exp),
    "Expand": expand,
    "Flatten": same_entries,
    "Floor": entrywise(torch.floor),
    "Gather": gather,
    "Gelu": gelu,
    "Gemm": gemm,
    "GlobalAveragePool": windows.global_average_pool,
    "GlobalMaxPool": windows.global_max_pool,
    "HardSigmoid": hard_sigmoid,
    "HardSwish": entrywise(functional.hardswish),
    "Identity": same,
    "InstanceNormalization": instance_norm,
    "LayerNormalization": layer_norm,
    "LeakyRelu": leaky_relu,
    "Log": entrywise(torch.log),
    "LogSoftmax": log_softmax,
    "MatMul": matrix_product,
    "Max": of_two(torch.maximum),
    "MaxPool": windows.max_pool,
    "Mean": mean_of,
    "Min": of_two(torch.minimum),
    "Mish": entrywise(functional.mish),
    "Mul": of_two(torch.mul),
    "Neg": entrywise(torch.neg),
    "PRelu": prelu,
    "Pad": pad,
    "Pow": power,
    "Reciprocal": entrywise(torch.reciprocal),
    "ReduceL1": total(lambda x, dim, keepdim: x.abs().sum(dim=dim, keepdim=keepdim)),
    "ReduceL2": total(lambda x, dim, keepdim: x.square().sum(dim=dim, keepdim=keepdim).sqrt()),
    "ReduceLogSumExp": total(torch.logsumexp),
    "ReduceMax": extreme(True),
    "ReduceMean": total(torch.mean),
    "ReduceMin": extreme(False),
    "ReduceSum": total(torch.sum),
    "ReduceSumSquare": total(lambda x, dim, keepdim: x.square().sum(dim=dim, keepdim=keepdim)),
    "Relu": entrywise(torch.relu),
    "Reshape": same_entries,
    "Round": entrywise(torch.round),
    "Selu": selu,
    "Sigmoid": entrywise(torch.sigmoid),
    "Sin": entrywise(torch.sin),
    "Sinh": entrywise(torch.sinh),
    "Slice": slices,
    "Softmax": softmax,
    "Softplus": entrywise(lambda x: functional.softplus(x, threshold=80.0)),
    "Softsign": entrywise(lambda x: x / (1 + x.abs())),
    "Split": split,
    "Sqrt": entrywise(torch.sqrt),
    "Squeeze": same_entries,
    "Sub": of_two(torch.sub),
    "Sum": of_two(torch.add),
    "Tanh": entrywise(torch.tanh),
    "Transpose": transpose,
    "Unsqueeze": same_entries,
    "Where": where,
}
