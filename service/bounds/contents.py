"""Tensors inside of other values: dataclasses that compare by identity, mappings, tuples and lists of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def own_copy(value: T) -> T:
    """``value`` with tensors of its own in place of all that are in it."""
    return _copied(value)  # type: ignore[no-any-return]


def fits(new: object, into: object) -> bool:
    """Whether all that is no tensor is equal, and all tensors have the same shapes and types."""
    first, second = list(_leaves(new)), list(_leaves(into))
    return len(first) == len(second) and all(map(_alike, first, second))


def overwrite(new: object, into: object) -> None:
    """Take the tensors of another value, which :func:`fits`, into those of a copy."""
    for source, target in zip(_leaves(new), _leaves(into), strict=True):
        if isinstance(target, Tensor):
            target.copy_(source)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if _holds(value):
        return replace(value, **{each.name: _copied(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, tuple | list) else value


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors and plain values in a fixed order, and what tells the form of all that holds them."""
    if _holds(value):
        yield type(value)
        for each in fields(value):
            yield from _leaves(getattr(value, each.name))
    elif isinstance(value, Mapping):
        yield tuple(value)
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, tuple | list):
        yield len(value)
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _holds(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type) and type(value).__eq__ is object.__eq__


def _alike(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)
    return first is second or (type(first) is type(second) and bool(first == second))
