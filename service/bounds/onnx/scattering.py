"""Converters of updates. At constant places they are linear in what is updated and in what it becomes, but for extremes
and products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from service.bounds.onnx.places import scattered
from service.bounds.operators.conversion import Array, Call, Converter, Shape, Values


def _scatter_elements(call: Call, values: Values, shape: Shape) -> Tensor:
    if values[1].array is None:
        return scattered(call, values, shape, _REDUCTIONS)
    indices = _indices(call, values)
    along = int(call.attributes.get("axis", 0)) % len(shape)
    grid = np.indices(indices.shape)
    places = tuple(indices % length if axis == along else grid[axis] for axis, length in enumerate(shape))
    targets: Array = np.asarray(np.ravel_multi_index(places, shape))
    return _scattered(call, values, shape, targets)


def _scatter_nd(call: Call, values: Values, shape: Shape) -> Tensor:
    indices = _indices(call, values)
    every = np.arange(int(np.prod(shape))).reshape(shape)
    return _scattered(call, values, shape, every[tuple(np.moveaxis(indices, -1, 0))])


def _indices(call: Call, values: Values) -> Array:
    indices = values[1].array
    if indices is None:
        raise call.refuse("its indices depend on the input")
    return indices


def _scattered(call: Call, values: Values, shape: Shape, targets: Array) -> Tensor:
    """Return the data, with updates at flat ``targets``, one for each update: what is kept, and a sum of updates."""
    data, updates = (values[index].float.reshape(-1, int(np.prod(values[index].shape))) for index in (0, 2))
    reduction = str(call.attributes.get("reduction", "none"))
    if reduction in _REDUCTIONS:
        return _reduced(_REDUCTIONS[reduction], data, updates, _all(data.shape[1], targets)).reshape(-1, *shape)
    sources = _last(data.shape[1], targets) if reduction == "none" else _all(data.shape[1], targets)
    given = torch.from_numpy(sources >= 0).to(updates.device, updates.dtype)
    places = torch.from_numpy(np.maximum(sources, 0).reshape(-1)).to(updates.device)
    added = (updates.index_select(1, places).reshape(-1, *sources.shape) * given).sum(dim=2)
    kept = data if reduction == "add" else data * (1 - given[:, 0])
    return (kept + added).reshape(-1, *shape)


def _reduced(function: Callable[[Tensor, Tensor], Tensor], data: Tensor, updates: Tensor, sources: Array) -> Tensor:
    """Return the data, with one update of each entry after the other; ``sources`` are those of :func:`_all`."""
    for column in sources.T:
        given = torch.from_numpy(column >= 0).to(updates.device)
        update = updates.index_select(1, torch.from_numpy(np.maximum(column, 0)).to(updates.device))
        data = torch.where(given, function(data, update), data)
    return data


_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max": torch.maximum,
    "min": torch.minimum,
    "mul": torch.mul,
}


def _last(entries: int, targets: Array) -> Array:
    """Return the index of the last update of each entry, ``(entries, 1)``; −1 without one."""
    found = np.full(entries, -1)
    found[targets.reshape(-1)] = np.arange(targets.size)
    return found[:, None]


def _all(entries: int, targets: Array) -> Array:
    """Return all updates of each entry, ``(entries, most)``, filled with −1."""
    flat = targets.reshape(-1)
    counts = np.bincount(flat, minlength=entries)
    found = np.full((entries, max(1, int(counts.max(initial=0)))), -1)
    order = np.argsort(flat, kind="stable")
    found[flat[order], np.arange(flat.size) - (np.cumsum(counts) - counts)[flat[order]]] = order
    return found


CONVERTERS: Mapping[str, Converter] = {
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
}
