"""Looks for state that checkpoints do not hold: what a model keeps beside its parameters and the buffers of its state
dict. A resumed run would begin with the constructor's.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from service.parallel.tensor.placement import state_buffers

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
_NOTHING = ("a value", repr(None))
_UNKNOWN = ("something else",)
_OF_OTHERS = {"torch", "service"}
"""Packages whose objects are not looked into."""
Form = tuple[Any, ...]
"""What is compared of a value: what it is, and its text or a digest."""


class HeldState:
    """What the modules of ``model`` keep beside its state dict, as their constructors left it.

    Numbers, texts, arrays and tensors in their attributes, also within collections and objects of their own packages,
    must stay as they are. What a forward sets first, such as a size or a table, must stay from then on. ``kind`` names
    the model in errors.
    """

    def __init__(self, model: nn.Module, kind: str = "") -> None:
        self._model, self._kind = model, kind or type(model).__name__.removeprefix("FSDP")
        self._first = dict(self._forms())

    def check(self) -> None:
        """Raise ``ValueError`` with the name of what has changed since."""
        for name, form in self._forms():
            if self._first.get(name, _NOTHING) == _NOTHING:
                self._first[name] = form
            elif form != self._first[name]:
                what = f"{form[0]} that forward changes, which checkpoints do not hold"
                raise lost(self._kind, name, f"{what}; register_buffer makes it one that they hold")

    def _forms(self) -> Iterator[tuple[str, Form]]:
        known = {id(value) for value in self._model.parameters()}
        known |= {id(value) for _, value in state_buffers(self._model)}
        looks = _Looks(_packages(self._model))
        for name, value in (*self._model.named_buffers(), *attributes(self._model)):
            if id(value) not in known:
                yield name, looks.form(value, {})


@dataclass(frozen=True)
class _Looks:
    """Looks into collections, and into objects of these packages."""

    packages: frozenset[str]

    def held(self, value: object) -> list[Any] | None:
        """Return what a value holds; ``None`` for what is not looked into."""
        if isinstance(value, dict):
            return [*value.keys(), *value.values()]
        if isinstance(value, list | tuple | deque):
            return list(value)
        if isinstance(value, set | frozenset):
            return sorted(value, key=repr)
        if isinstance(value, nn.Module | Tensor | type) or not hasattr(value, "__dict__"):
            return None
        is_own = isinstance(value, SimpleNamespace) or _package(value) in self.packages
        return [*vars(value).keys(), *vars(value).values()] if is_own else None

    def within(self, value: object, seen: set[int]) -> Iterator[Any]:
        """Yield a value and what it holds, at any depth."""
        yield value
        if id(value) not in seen:
            seen.add(id(value))
            for each in self.held(value) or ():
                yield from self.within(each, seen)

    def form(self, value: object, seen: dict[int, int]) -> Form:
        """Return what is compared of a value."""
        if isinstance(value, Tensor):
            return ("a tensor", digest(value)) if type(value) is Tensor and not value.is_meta else _UNKNOWN
        if isinstance(value, np.ndarray):
            return "an array", value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest()
        if isinstance(value, _PLAIN):
            return "a number" if isinstance(value, int | float | complex | np.number) else "a value", repr(value)
        if id(value) in seen:
            return "a value", seen[id(value)]
        seen[id(value)] = len(seen)
        held = self.held(value)
        return _UNKNOWN if held is None else ("a collection", *(self.form(each, seen) for each in held))


def check_attributes(network: nn.Module) -> None:
    """Raise ``ValueError`` for state beside parameters and buffers that cannot be compared: a module's own
    serialisation, a generator of random numbers, an iterator.
    """
    kind, looks = type(network).__name__, _Looks(_packages(network))
    for name, module in network.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(f"{name or kind} has get_extra_state: checkpoints hold tensors alone")
    for name, value in attributes(network):
        for each in looks.within(value, set()):
            for kinds, what in ((_GENERATORS, "a generator of random numbers"), (Iterator, "an iterator")):
                if isinstance(each, kinds):
                    raise lost(kind, name, f"{what}, which a resumed run would begin anew")


@contextmanager
def modes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave each part of the modules in training or in evaluation mode as it was: some may always be in evaluation."""
    parts = [part for module in modules for part in module.modules()]
    were = [part.training for part in parts]
    try:
        yield
    finally:
        for part, was in zip(parts, were, strict=True):
            part.training = was


def begin_training(model: nn.Module) -> None:
    """Put a model in training mode, but for parts that its constructor or its own ``train`` leaves in evaluation."""
    resting = [part for part in model.modules() if not part.training]
    model.train()
    for part in resting:
        part.training = False


def attributes(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what the modules' own code has set beside parameters, buffers and modules, by qualified name."""
    for prefix, module in network.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                yield f"{prefix}.{name}" if prefix else name, value


def digest(value: Tensor) -> str:
    """Return a digest of a tensor's type, shape and bits."""
    bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode() + bits.numpy().tobytes()).hexdigest()


def lost(kind: str, name: str, what: str) -> ValueError:
    return ValueError(f"the attribute {name!r} of {kind} is {what}")


def _packages(model: nn.Module) -> frozenset[str]:
    return frozenset(map(_package, model.modules())) - _OF_OTHERS


def _package(value: object) -> str:
    return type(value).__module__.partition(".")[0]
