"""Who calls which compiled module, from where, and with what."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn

Phase = Literal["train", "inference"]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Site:
    """A place in the source."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Origin:
    """The call that made something: of which module, where, in which step (counted from 0)."""

    module: str
    site: Site
    step: int

    def __str__(self) -> str:
        return f"{self.module}, called at {self.site}"


@dataclass(frozen=True)
class Invocation:
    """A way of calling a module. ``phase`` is the module's own mode, ``grad`` whether gradients were on."""

    module: str
    phase: Phase
    grad: bool
    thread: str
    shapes: Shapes


class Ledger:
    """How often modules were called, by the way of calling; any thread may add."""

    def __init__(self) -> None:
        self._counts: Counter[Invocation] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, function: Callable[..., Any], arguments: Any) -> Invocation:
        invocation = Invocation(
            name,
            "train" if isinstance(function, nn.Module) and function.training else "inference",
            torch.is_grad_enabled(),
            threading.current_thread().name,
            tuple(tuple(tensor.shape) for tensor in tensors_in(arguments)),
        )
        with self._lock:
            self._counts[invocation] += 1
        return invocation

    def counts(self) -> dict[Invocation, int]:
        with self._lock:
            return dict(self._counts)


def caller(*, outside: tuple[str, ...], depth: int = 1) -> Site:
    """The nearest frame above the caller whose file contains none of ``outside``."""
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None and frame.f_back is not None and _within(frame, outside):
        frame = frame.f_back
    assert frame is not None
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _within(frame: FrameType, parts: tuple[str, ...]) -> bool:
    return any(part in frame.f_code.co_filename for part in parts)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name))


def copied(value: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor replaced by ``copy`` of it; containers are rebuilt, anything else is as it was."""
    if isinstance(value, Tensor):
        return copy(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(part, copy) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(copied(part, copy) for part in value)
    if isinstance(value, dict):
        return type(value)((key, copied(part, copy)) for key, part in value.items())
    return value
