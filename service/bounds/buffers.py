"""Copies values that hold tensors into buffers of recorded computations, to be filled with other values later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from service.parallel.containers import children, map_tensors

T = TypeVar("T")


def own_copy(value: T) -> T:
    """Return a copy of ``value`` whose tensors are new, contiguous and detached."""
    return map_tensors(value, lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format))


def fits(new: object, into: object) -> bool:
    """Return whether all plain values are equal, and all tensors have the same shapes, types and devices."""
    first, second = list(_leaves(new)), list(_leaves(into))
    return len(first) == len(second) and all(map(_alike, first, second))


def overwrite(new: object, into: object) -> None:
    """Copy the tensors of another value that :func:`fits` into those of a copy."""
    for source, target in zip(_leaves(new), _leaves(into), strict=True):
        if isinstance(target, Tensor):
            target.copy_(source)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield tensors and plain values in a fixed order; a container's type and keys come before its contents.

    A dataclass that compares by value holds no tensors, and is a plain value.
    """
    by_value = is_dataclass(value) and type(value).__eq__ is not object.__eq__
    held = None if by_value else children(value)
    if held is None:
        yield value
        return
    parts = list(held)
    yield type(value) if is_dataclass(value) else tuple(key for key, _ in parts)
    for _, child in parts:
        yield from _leaves(child)


def _alike(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)
    return first is second or (type(first) is type(second) and bool(first == second))
