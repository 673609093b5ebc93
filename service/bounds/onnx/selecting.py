"""Converters of operators that order or choose entries: the largest ones, images at constant places, rows of tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from service.bounds.onnx.logic import MOST_WHOLE, positive
from service.bounds.onnx.places import can_rank, ranked
from service.bounds.onnx.reductions import along_axis
from service.bounds.operators.conversion import Call, Converted, Converter, Found, Shape, Value, Values, axis

MOST_COMPARISONS, MOST_ENTRIES, MOST_CHOSEN_FROM = 512, 2**24, 2**22
"""Comparisons of entries in a row, entries of a matrix of samples, and of the tables of all indices together."""


def _top(call: Call, values: Values, shape: Shape) -> list[Found]:
    """Return the largest or least entries, in order, by comparing neighbours, and their places if not too many."""
    if call.outputs[1:] and call.opset < 10:
        raise call.refuse("before opset 10 it is not supported")
    if values[1].array is None:
        raise call.refuse("its number depends on the input")
    rank, count = len(values[0].shape), values[1].integers[0]
    dim = int(call.attributes.get("axis", -1)) % rank + 1
    length = values[0].shape[dim - 1]
    if count * length > MOST_COMPARISONS:
        raise call.refuse(f"the first {count} of {length}: at most {MOST_COMPARISONS} comparisons are supported")
    x, largest = values[0].float, bool(call.attributes.get("largest", 1))
    places = [ranked(x, dim, count, largest=largest)] if any(call.outputs[1:]) and can_rank(length) else []
    first, second = (torch.maximum, torch.minimum) if largest else (torch.minimum, torch.maximum)
    left, found = list(torch.split(x, 1, dim=dim)), list[Tensor]()
    for _ in range(count):
        for index in range(len(left) - 1, 0, -1):
            left[index - 1], left[index] = first(left[index - 1], left[index]), second(left[index - 1], left[index])
        found.append(left.pop(0))
    return [torch.cat(found, dim=dim), *places]


def _place_of(*, largest: bool) -> Converter:
    """Return the converter of the place of the largest or the least entry, the first of several or the last."""

    def convert(call: Call, values: Values, shape: Shape) -> Tensor:
        x, dim = values[0].float, axis(int(call.attributes.get("axis", 0)), len(values[0].shape))
        if x.shape[dim] > MOST_COMPARISONS:
            raise call.refuse(f"the place in {x.shape[dim]}: at most {MOST_COMPARISONS} comparisons are supported")
        last = bool(call.attributes.get("select_last_index", 0))
        return place_of_largest(x if largest else -x, dim, last=last).reshape(-1, *shape)

    return convert


def place_of_largest(x: Tensor, dim: int, *, last: bool = False) -> Tensor:
    """Return the place of the largest entry along a dimension, which stays with length 1: the number of places before
    which all entries are less than the largest from there on; with ``last``, no more than it.
    """
    entries = torch.split(x, 1, dim=dim)
    before, after = [entries[0]], [entries[-1]]
    for first, second in zip(entries[1:-1], reversed(entries[1:-1]), strict=True):
        before.append(torch.maximum(before[-1], first))
        after.append(torch.maximum(after[-1], second))
    if len(entries) == 1:
        return entries[0] - entries[0]
    gained = torch.cat(after[::-1], dim=dim) - torch.cat(before, dim=dim)
    return (1 - positive(-gained) if last else positive(gained)).sum(dim=dim, keepdim=True)


def _hard_max(call: Call, values: Values, shape: Shape) -> Converted:
    """Return 1 at the first of the largest entries along an axis, and 0 elsewhere: no entry before it is as large, and
    none after it is larger.
    """
    return along_axis(partial(_first_of_largest, call))(call, values, shape)


def _first_of_largest(call: Call, x: Tensor, dim: int) -> Tensor:
    if x.shape[dim] > MOST_COMPARISONS:
        raise call.refuse(f"the largest of {x.shape[dim]}: at most {MOST_COMPARISONS} comparisons are supported")
    place = place_of_largest(x, dim)
    places = torch.arange(x.shape[dim], dtype=x.dtype, device=x.device)
    places = places.reshape(-1, *(1,) * (x.ndim - 1 - dim))
    return (1 - positive(place - places - 0.5)) * (1 - positive(places - place - 0.5))


def _extracted(call: Call, values: Values, shape: Shape) -> Tensor:
    """Choose entries of constants by places that depend on the input, as the names of classes are."""
    if not values[0].constant:
        raise call.refuse("its values depend on the input")
    return looked_up(replace(call, attributes={"axis": -1}), values, shape).reshape(-1, *shape)


def _sampled(call: Call, values: Values, shape: Shape) -> Tensor:
    """Sample images at constant places: the matrix of samples is what onnxruntime makes of an identity."""
    from service.bounds.onnx.reading import run_alone  # noqa: PLC0415 - reading uses what converters are

    grid, given = values[1].array, values[0].shape
    if grid is None:
        raise call.refuse("its places depend on the input")
    if given[0] != 1:
        raise call.refuse(f"{given[0]} images in one instance; samples of one are supported")
    entries, samples = int(np.prod(given[2:])), int(np.prod(shape[2:]))
    if entries * samples > MOST_ENTRIES:
        raise call.refuse(f"{samples} samples of {entries} entries; their product may be {MOST_ENTRIES}")
    identity = np.eye(entries, dtype=grid.dtype).reshape(1, entries, *given[2:])
    matrix = torch.from_numpy(run_alone(call, [identity, grid]).reshape(entries, samples).copy())
    x = values[0].float
    return torch.matmul(x.reshape(-1, *given[:2], entries), matrix.to(x)).reshape(-1, *shape)


def _one_hot(call: Call, values: Values, shape: Shape) -> Tensor:
    """Return the second of two constants where the index, a whole number, is that of the place, and else the first."""
    indices, depth, pair = values
    if depth.array is None or pair.array is None:
        raise call.refuse("its depth or its values depend on the input")
    dim, x = axis(int(call.attributes.get("axis", -1)), len(shape)), indices.float
    places = torch.arange(depth.integers[0], dtype=x.dtype, device=x.device)
    distance = x.unsqueeze(-1) - places
    off, on = (float(each) for each in pair.array.reshape(-1))
    first, second = (positive(each + 0.5) - positive(each - 0.5) for each in (distance, distance + len(places)))
    near = first + second if indices.places is None or indices.places.shape[-1] != len(places) else indices.places
    return (off + (on - off) * near).movedim(-1, dim).reshape(-1, *shape)


def looked_up(call: Call, values: Values, shape: Shape) -> Tensor:
    """Choose rows of a constant table by whole numbers that depend on the input, as embeddings are.

    Neighbours are chosen between first, then pairs of them, so that bounds are the hull of the rows that are left. An
    index below 0 counts from the end.
    """
    data, indices = values
    data = _as_numbers(call, data, indices.float)
    dim, count = int(call.attributes.get("axis", 0)) % len(data.shape), data.shape[int(call.attributes.get("axis", 0))]
    rows = data.float.movedim(dim, 0).reshape(count, -1)
    entries = 2 * rows.numel() * max(1, int(np.prod(indices.shape)))
    if entries > MOST_CHOSEN_FROM:
        indexed = f"its {int(np.prod(indices.shape))} indices of {count} rows depend on the input"
        most = f"{entries} entries to choose from, {MOST_CHOSEN_FROM} at most"
        raise call.refuse(f"{indexed}: {most}; fix the indices (model.inputs), or make the rows the input")
    places = indices.float.reshape(-1, int(np.prod(indices.shape)), 1, 1)
    left, first, length = torch.cat([rows, rows]), -count, 1
    while left.shape[-2] > 1:
        if left.shape[-2] % 2:
            left = torch.cat([left, left[..., -1:, :]], dim=-2)
        even, odd = left[..., 0::2, :], left[..., 1::2, :]
        starts = first + length + 2 * length * torch.arange(even.shape[-2], dtype=rows.dtype, device=rows.device)
        asked = places - (starts - 0.5).unsqueeze(-1)
        left = torch.where(asked.expand(-1, -1, *even.shape[-2:]) > 0, odd, even)
        length *= 2
    found = left.reshape(-1, *indices.shape, *data.shape[:dim], *data.shape[dim + 1 :])
    inner = len(indices.shape)
    order = [*range(inner, inner + dim), *range(inner), *range(inner + dim, inner + len(data.shape) - 1)]
    return found.permute(0, *(1 + each for each in order))


def _as_numbers(call: Call, table: Value, like: Tensor) -> Value:
    """Return a constant of whole numbers as floating-point numbers, which are whole, too."""
    if table.tensor is not None or table.array is None:
        return table
    if table.array.size and int(np.abs(table.array.astype(np.float64)).max()) > MOST_WHOLE:
        raise call.refuse(f"its indices depend on the input, and it chooses integers above {MOST_WHOLE}")
    return replace(table, tensor=torch.from_numpy(table.array.astype(np.float64)).to(like))


CONVERTERS: Mapping[str, Converter] = {
    "ArgMax": _place_of(largest=True),
    "ArgMin": _place_of(largest=False),
    "GridSample": _sampled,
    "Hardmax": _hard_max,
    "OneHot": _one_hot,
    "TopK": _top,
    "ai.onnx.ml.ArrayFeatureExtractor": _extracted,
}
