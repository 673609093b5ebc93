"""Tensors in containers: nested tuples, lists, mappings and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

K = TypeVar("K")
T = TypeVar("T")


def children(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a container, each with its index, key or field name; ``None`` for anything else."""
    if isinstance(value, tuple | list):
        return enumerate(value)
    if isinstance(value, dict | Mapping):  # dictionaries first: the abstract class takes longer to ask
        return value.items()
    if isinstance(value, Tensor):
        return None
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested containers, in their order."""
    if isinstance(value, Tensor):
        yield value
        return
    for _, child in children(value) or ():
        yield from tensors_in(child)


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with a dotted name that begins with ``name`` and leads to it."""
    if isinstance(value, Tensor):
        yield name, value
        return
    for key, child in children(value) or ():
        yield from named_tensors(f"{name}.{key}", child)


def in_batches(values: Iterable[tuple[K, Tensor]], most: int) -> Iterator[list[tuple[K, Tensor]]]:
    """Yield the tensors in their order, in batches of ``most`` bytes or a single tensor."""
    batch, size = list[tuple[K, Tensor]](), 0
    for key, value in values:
        if batch and size + value.nbytes > most:
            yield batch
            batch, size = [], 0
        batch.append((key, value))
        size += value.nbytes
    if batch:
        yield batch


def map_tensors(value: T, function: Callable[[Tensor], Tensor]) -> T:
    """Return ``value`` with ``function`` applied to each tensor.

    Tuples, lists and mappings are new ones (a mapping that is no ``dict`` becomes one), and so are dataclasses in which
    anything changes; all else stays.
    """
    return _mapped(value, function)  # type: ignore[no-any-return]


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    held = children(value)
    if held is None:
        return value
    parts = list(held)
    new = [(key, _mapped(child, function)) for key, child in parts]
    if isinstance(value, list | tuple):
        items = (child for _, child in new)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return type(value)(new) if isinstance(value, dict) else dict(new)
    if all(child is old for (_, child), (_, old) in zip(new, parts, strict=True)):
        return value
    given = {field.name for field in fields(value) if field.init}
    return replace(value, **{name: child for name, child in new if name in given})
