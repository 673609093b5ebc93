"""Records who calls which compiled module, from where, and with what."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from service.jobs.spec.compile import Phase
from service.parallel.containers import tensors_in

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CallSite:
    """A place in the source."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Origin:
    """Names the call that made something: its module, its place, its step (counted from 0)."""

    module: str
    site: CallSite
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


class CallCounter:
    """Counts calls of modules, by how they were called; any thread may add."""

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


def caller(*, outside: tuple[str, ...], depth: int = 1) -> CallSite:
    """Return the nearest frame above the caller whose file contains none of ``outside``."""
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None and frame.f_back is not None and _within(frame, outside):
        frame = frame.f_back
    assert frame is not None
    return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _within(frame: FrameType, parts: tuple[str, ...]) -> bool:
    return any(part in frame.f_code.co_filename for part in parts)
