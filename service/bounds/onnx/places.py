"""Entries at places that depend on the input, as a router chooses experts: by ``TopK``, ``Gather`` and scatters.

A place is a whole number, or, where it is known, the truth of each place that it may be: bounds of a number tell only
between which ones it lies. Every entry then is one of two values by such a truth. Where bounds settle the truths, that
is a constant choice; where not, it is the union of what may be there.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.bounds.onnx.logic import positive
from service.bounds.operators.choice import choose
from service.bounds.operators.conversion import Call, ChosenPlaces, Shape, Value, Values

MOST_PAIRS, MOST_PLACED = 2**12, 2**22
"""The most pairs of entries in a row that are compared, and the most entries that may be put somewhere."""

KEEPING = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that leave whole numbers as they are, in their order."""


def ranked(x: Tensor, dim: int, count: int, *, largest: bool) -> ChosenPlaces:
    """Return the places of the first ``count`` entries along a dimension, in order; of equal ones the first comes
    first.

    The rank of an entry is the number of those that come before it, each by one comparison.
    """
    x = (x if largest else -x).movedim(dim, -1)
    length = x.shape[-1]
    pairs = np.triu_indices(length, 1)
    first, second = (torch.from_numpy(each).to(x.device) for each in pairs)
    falls = positive(x.index_select(x.dim() - 1, second) - x.index_select(x.dim() - 1, first))
    # Where the second of a pair is larger, the first comes after it, and the second not after the first.
    moved = (np.arange(length)[:, None] == pairs[0]).astype(float) - (np.arange(length)[:, None] == pairs[1])
    before = torch.arange(length, dtype=x.dtype, device=x.device)
    rank = functional.linear(falls, torch.from_numpy(moved).to(x.device, x.dtype), before).unsqueeze(-2)
    asked = torch.arange(count, dtype=x.dtype, device=x.device).unsqueeze(-1)
    truths = positive(rank - (asked - 0.5)) - positive(rank - (asked + 0.5))
    numbers = (truths * before).sum(dim=-1).clamp(0, length - 1)  # bounds of sums forget that only one is 1
    return ChosenPlaces(numbers.movedim(-1, dim), truths.movedim(-2, dim))


def can_rank(length: int) -> bool:
    return length * (length - 1) // 2 <= MOST_PAIRS


def _truths(value: Value, length: int) -> Tensor:
    """Return whether each place is each of ``length`` ones, ``(instances, *shape, length)``; −1 is the last one."""
    if value.places is not None and value.places.shape[-1] == length:
        return value.places
    x = value.float.unsqueeze(-1)
    places = torch.arange(length, dtype=x.dtype, device=x.device)
    return sum(
        (positive(x - (each - 0.5)) - positive(x - (each + 0.5)) for each in (places, places - length)),
        start=torch.zeros((), dtype=x.dtype, device=x.device),
    )


def gathered(call: Call, values: Values, shape: Shape) -> Tensor:
    """Return rows of a value that depends on the input, as ``Gather`` does."""
    data, indices = values
    dim = int(call.attributes.get("axis", 0)) % len(data.shape)
    inner, length = len(indices.shape), data.shape[dim]
    _check(call, length * prod(shape))
    truths = _truths(indices, length)
    truths = truths.reshape(-1, *(1,) * dim, *indices.shape, *(1,) * (len(data.shape) - dim - 1), length)
    rows = [
        each.reshape(-1, *data.shape[:dim], *(1,) * inner, *data.shape[dim + 1 :])
        for each in torch.split(data.float, 1, dim + 1)
    ]
    return _one_of(rows, truths, shape)


def gathered_elements(call: Call, values: Values, shape: Shape) -> Tensor:
    """Return entries along an axis, one for each place, as ``GatherElements`` does."""
    data, indices = values
    dim = int(call.attributes.get("axis", 0)) % len(data.shape)
    _check(call, data.shape[dim] * prod(shape))
    x = data.float if not data.constant else data.float.unsqueeze(0)
    for axis, (own, length) in enumerate(zip(shape, data.shape, strict=True)):
        x = x if axis == dim or own == length else x.narrow(axis + 1, 0, own)
    return _one_of(list(torch.split(x, 1, dim + 1)), _truths(indices, data.shape[dim]), shape)


def _one_of(rows: list[Tensor], truths: Tensor, shape: Shape) -> Tensor:
    """Return the row whose truth, along the last dimension, is 1."""
    found = rows[0].expand(-1, *shape)
    for row, truth in zip(rows[1:], torch.split(truths, 1, -1)[1:], strict=True):
        found = choose((truth.squeeze(-1) - 0.5).expand(-1, *shape), row.expand(-1, *shape), found)
    return found


def scattered(
    call: Call, values: Values, shape: Shape, reductions: dict[str, Callable[[Tensor, Tensor], Tensor]]
) -> Tensor:
    """Return the data with updates at places along an axis, one after the other, as ``ScatterElements`` does."""
    data, indices, updates = values
    dim = int(call.attributes.get("axis", 0)) % len(shape)
    if any(own != length for axis, (own, length) in enumerate(zip(indices.shape, shape, strict=True)) if axis != dim):
        raise call.refuse("its indices depend on the input, and leave out entries of other dimensions than its axis")
    _check(call, indices.shape[dim] * prod(shape))
    reduced = (reductions | {"none": lambda old, new: new, "add": torch.add})[
        str(call.attributes.get("reduction", "none"))
    ]
    truths = _truths(indices, shape[dim])
    found, every = (each.float if not each.constant else each.float.unsqueeze(0) for each in (data, updates))
    for index in range(indices.shape[dim]):
        here = truths.select(dim + 1, index).movedim(-1, dim + 1).expand(-1, *shape)
        update = every.narrow(dim + 1, index, 1).expand(-1, *shape)
        found = choose(here - 0.5, reduced(found, update).expand(-1, *shape), found)
    return found


def _check(call: Call, entries: int) -> None:
    if entries > MOST_PLACED:
        raise call.refuse(f"its indices depend on the input: {entries} entries to choose from, {MOST_PLACED} at most")
