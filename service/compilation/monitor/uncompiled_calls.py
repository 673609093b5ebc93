"""Records how an uncompiled program calls the modules to compile: only ``module(...)`` runs compiled code."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import FunctionType, MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from service.parallel.boundary.watch import in_backward
from service.parallel.containers import tensors_in

_ITSELF = ""


@dataclass(frozen=True)
class Called:
    """A way of calling ``unit``: by ``method``, which is empty for ``unit(...)``.

    ``within`` names the unit whose call made it, and with which it is compiled; empty if none did.
    """

    unit: str
    method: str = _ITSELF
    within: str = ""

    @property
    def is_bypass(self) -> bool:
        """Return whether the call runs uncompiled although its module is compiled."""
        return self.method != _ITSELF and not self.within

    def __str__(self) -> str:
        return f"{self.unit}.{self.method}" if self.method else f"{self.unit}(...)"


Calls = Mapping[Called, int]


class CallCounts(Counter[Called]):
    """Counts calls. ``differentiable``: units that gave a result through which gradients flow back."""

    def __init__(self) -> None:
        super().__init__()
        self.differentiable: set[str] = set()


@contextmanager
def counted_calls(units: Mapping[str, nn.Module]) -> Iterator[CallCounts]:
    """Count the calls of ``units``, by name: of the modules, and of methods that take or return tensors.

    A method that calls the module itself is not counted twice, and recomputation in a backward is not counted.
    """
    counter = _Counter({id(unit): name for name, unit in units.items()})
    with ExitStack() as stack:
        for kind in {type(unit) for unit in units.values()}:
            stack.enter_context(patch.object(kind, "__call__", counter.counting(_ITSELF, kind.__call__)))
        for owner in {*units.values(), *(kind for unit in units.values() for kind in _own_classes(unit))}:
            for name, value in list(vars(owner).items()):
                if isinstance(value, FunctionType | MethodType) and not name.startswith("__"):
                    stack.enter_context(patch.object(owner, name, counter.counting(name, value)))
        yield counter.counts


def _own_classes(unit: nn.Module) -> Iterator[type]:
    """Yield the module's classes, without those of PyTorch that every module has."""
    return (kind for kind in type(unit).__mro__ if kind not in {*nn.Module.__mro__, *FSDPModule.__mro__})


@dataclass
class _ActiveCall:
    """A call that is under way. ``reached``: it has led to the module's own call."""

    unit: str
    method: str
    reached: bool = False


class _Counter:
    def __init__(self, names: Mapping[int, str]) -> None:
        self.names, self.counts = names, CallCounts()
        self._threads = threading.local()
        self._lock = threading.Lock()

    @property
    def _under_way(self) -> list[_ActiveCall]:
        entries: list[_ActiveCall] = self._threads.__dict__.setdefault("entries", [])
        return entries

    def counting(self, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` of a class, or method of one module, with its calls from outside counted."""
        if isinstance(function, MethodType):
            owner, bound = function.__self__, function
            return MethodType(self.counting(method, lambda _module, *given, **named: bound(*given, **named)), owner)

        @wraps(function)
        def counted(module: nn.Module, *arguments: Any, **named: Any) -> Any:
            name = self.names.get(id(module))
            if name is None or in_backward() or self._is_within(name, method):
                return function(module, *arguments, **named)
            entry = _ActiveCall(name, method)
            self._under_way.append(entry)
            try:
                result = function(module, *arguments, **named)
            finally:
                self._under_way.pop()
            if torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in(result)):
                self.counts.differentiable.add(name)
            if method == _ITSELF or (not entry.reached and any(True for _ in tensors_in((arguments, named, result)))):
                self._count(name, method)
            return result

        return counted

    def _is_within(self, name: str, method: str) -> bool:
        """Return whether this call is part of a running call of the same module."""
        own = [entry for entry in self._under_way if entry.unit == name]
        if method != _ITSELF:
            return bool(own)
        for entry in own:
            entry.reached = True
        return any(entry.method == _ITSELF for entry in own)

    def _count(self, name: str, method: str) -> None:
        outer = (entry.unit for entry in reversed(self._under_way) if entry.method == _ITSELF)
        with self._lock:
            self.counts[Called(name, method, next(outer, ""))] += 1
