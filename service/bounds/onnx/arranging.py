"""Converters of operators that move entries around."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.flat import by_instance
from service.bounds.onnx.places import gathered, gathered_elements
from service.bounds.onnx.reading import run_alone
from service.bounds.onnx.selecting import looked_up
from service.bounds.operators.conversion import Array, Call, Converter, Shape, Value, Values, axis, integers, number


def _same_entries(call: Call, values: Values, shape: Shape) -> Tensor:
    """Reshapes of every kind: the shape is known."""
    return values[0].float.reshape(-1, *shape)


def _concatenate(call: Call, values: Values, shape: Shape) -> Tensor:
    batch = next(value.float.shape[0] for value in values if not value.constant)
    return torch.cat([_batched(value, batch) for value in values], dim=axis(call.attributes["axis"], len(shape)))


def _batched(value: Value, batch: int | torch.SymInt) -> Tensor:
    """Return the value with a batch dimension; a constant is repeated."""
    return value.float.expand(batch, *value.shape) if value.constant else value.float


def _transpose(call: Call, values: Values, shape: Shape) -> Tensor:
    rank = len(values[0].shape)
    order = call.attributes.get("perm", list(range(rank))[::-1])
    return values[0].float.permute(0, *(position + 1 for position in order))


def _expand(call: Call, values: Values, shape: Shape) -> Tensor:
    value = values[0]
    x = value.float.reshape(-1, *(1,) * (len(shape) - len(value.shape)), *value.shape)
    return x.expand(-1, *shape)


def _slices(call: Call, values: Values, shape: Shape) -> Tensor:
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


def _gather(call: Call, values: Values, shape: Shape) -> Tensor:
    data, indices = values
    if data.constant:
        return looked_up(call, values, shape)
    if not indices.constant:
        return gathered(call, values, shape)
    dim = axis(call.attributes.get("axis", 0), len(data.shape))
    chosen = [index % data.shape[dim - 1] for index in indices.integers]
    return data.float.index_select(dim, torch.tensor(chosen, device=data.float.device)).reshape(-1, *shape)


def _split(call: Call, values: Values, shape: Shape) -> list[Tensor]:
    x = values[0].float
    dim = axis(call.attributes.get("axis", 0), len(values[0].shape))
    lengths = integers(call, values, 1, "split")
    if lengths is None:
        share = -(-x.shape[dim] // len(call.outputs))
        lengths = [min(share, x.shape[dim] - share * index) for index in range(len(call.outputs))]
    return list(torch.split(x, lengths, dim=dim))


def _pad(call: Call, values: Values, shape: Shape) -> Tensor:
    x, rank = values[0].float, len(values[0].shape)
    pads, mode = integers(call, values, 1, "pads"), call.attributes.get("mode", "constant")
    if mode != "constant":
        return _move_entries(call, values, shape)
    if pads is None:
        raise call.refuse("it has no pads")
    axes = integers(call, values, 3, "axes") or list(range(rank))
    before, after = [0] * rank, [0] * rank
    for index, given in enumerate(axes):
        before[given % rank], after[given % rank] = pads[index], pads[index + len(axes)]
    widths = [width for each in reversed(range(rank)) for width in (before[each], after[each])]
    return functional.pad(x, widths, value=number(call, values, 2, "value") or 0.0)


def _move_entries(call: Call, values: Values, shape: Shape) -> Tensor:
    """Whatever repeats, drops or reorders entries: onnxruntime does it to their numbers. 0 is what it fills in."""
    if not all(value.constant for value in values[1:] if value.present) or values[0].constant:
        raise call.refuse("more than its first input depends on the input")
    numbered = np.arange(1.0, 1 + np.prod(values[0].shape, dtype=int)).reshape(values[0].shape)
    source = run_alone(call, [numbered, *(value.array for value in values[1:])]).reshape(-1).astype(np.int64)
    x = values[0].float
    chosen = by_instance(x).index_select(1, torch.from_numpy(np.maximum(source - 1, 0)).to(x.device))
    if (source == 0).any():
        chosen = chosen * torch.from_numpy(source > 0).to(x.device, x.dtype)
    return chosen.reshape(-1, *shape)


def _resize(call: Call, values: Values, shape: Shape) -> Tensor:
    """Along one dimension after the other, by the matrix that onnxruntime applies to each entry alone."""
    if str(call.attributes.get("coordinate_transformation_mode", "")) == "tf_crop_and_resize":
        raise call.refuse("coordinate_transformation_mode 'tf_crop_and_resize' is not supported")
    x, given, of_one_ratio = values[0].float, values[0].shape, _sizes_of_one_ratio(call, values)
    for index, (before, after) in enumerate(zip(given, shape, strict=True)):
        if before != after or _scale(call, values, index) not in (None, 1.0) or index in of_one_ratio:
            matrix = torch.from_numpy(_along(call, values, index, before, after)).to(x.device, x.dtype)
            x = torch.matmul(x.movedim(index + 1, -1), matrix).movedim(-1, index + 1)
    return x.reshape(-1, *shape)


def _scale(call: Call, values: Values, index: int) -> float | None:
    """Return the scale of a dimension; ``None`` if sizes are given instead."""
    if "scales" in call.attributes:
        return float(call.attributes["scales"][index])
    place = 1 if call.operator == "Upsample" or call.opset < 11 else 2
    scales = values[place] if len(values) > place else None
    if scales is None or scales.array is None or not scales.array.size:
        return None
    axes = _axes(call, values)
    return float(scales.array[axes.index(index)]) if index in axes else 1.0


def _axes(call: Call, values: Values) -> list[int]:
    return [int(each) % len(values[0].shape) for each in call.attributes.get("axes", range(len(values[0].shape)))]


def _sizes_of_one_ratio(call: Call, values: Values) -> dict[int, int]:
    """Return the sizes by dimension where one of them decides the scale of all; the first is that one."""
    policy = call.attributes.get("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch" or len(values) < 4 or values[3].array is None:
        return {}
    given = dict(zip(_axes(call, values), values[3].integers, strict=True))
    return dict(
        sorted(given.items(), key=lambda each: each[1] / values[0].shape[each[0]], reverse=policy == "not_smaller")
    )


def _along(call: Call, values: Values, index: int, before: int, after: int) -> Array:
    """Return ``(before, after)``: each unit vector resized."""
    scale = _scale(call, values, index)
    # Before opset 13 an input that is not given is empty; from there on it is left out.
    unit, none = np.eye(before, dtype=np.float32), np.zeros(0, dtype=np.float32) if call.opset < 13 else None
    attributes = {
        name: each
        for name, each in call.attributes.items()
        if name not in ("axes", "scales", "keep_aspect_ratio_policy")
    }
    scales = np.array([1, after / before if scale is None else scale], dtype=np.float32)
    if call.operator == "Upsample" and call.opset < 9:
        return run_alone(replace(call, attributes={**attributes, "scales": scales.tolist()}), [unit])
    alone = replace(call, attributes=attributes)
    if call.operator == "Upsample" or call.opset < 11:
        return run_alone(alone, [unit, scales])
    if sizes := _sizes_of_one_ratio(call, values):
        return _beside(alone, values[0].shape, sizes, index)
    if scale is None:
        return run_alone(alone, [unit, none, none, np.array([before, after])])
    return run_alone(alone, [unit, none, scales])


def _beside(alone: Call, given: Shape, sizes: Mapping[int, int], index: int) -> Array:
    """Resize each unit vector beside the dimension that decides the scale, along which it is constant."""
    first, before = next(iter(sizes)), given[index]
    if index == first:
        return run_alone(alone, [np.eye(before, dtype=np.float32), None, None, np.array([before, sizes[index]])])
    unit = np.repeat(np.eye(before, dtype=np.float32)[None, :, None], given[first], axis=2)
    kept = {"axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"}
    wanted = np.array([sizes[first], -(-sizes[first] * before // given[first]) + 1])
    return run_alone(replace(alone, attributes={**alone.attributes, **kept}), [unit, None, None, wanted])[0, :, 0]


CONVERTERS: Mapping[str, Converter] = {
    "Compress": _move_entries,
    "Concat": _concatenate,
    "DepthToSpace": _move_entries,
    "Expand": _expand,
    "Flatten": _same_entries,
    "Gather": _gather,
    "GatherElements": lambda call, values, shape: (_move_entries if values[1].constant else gathered_elements)(
        call, values, shape
    ),
    "GatherND": _move_entries,
    "Pad": _pad,
    "Reshape": _same_entries,
    "Resize": _resize,
    "ReverseSequence": _move_entries,
    "Slice": _slices,
    "SpaceToDepth": _move_entries,
    "Split": _split,
    "Squeeze": _same_entries,
    "Tile": _move_entries,
    "Transpose": _transpose,
    "Trilu": _move_entries,
    "Unsqueeze": _same_entries,
    "Upsample": _resize,
}
