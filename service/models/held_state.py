"""Looks for state that checkpoints do not hold: what a model keeps beside its parameters and the buffers of its state
dict, and what an objective or an optimizer keeps for itself. A resumed run would begin with the constructor's.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from service.parallel.tensor.placement import state_buffers

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
_NUMBERS = (int, float, complex, np.number)
_OF_OTHERS = {"torch", "service", "builtins", "abc", "typing"}
"""Packages whose objects are not looked into."""
_DEEPEST = 32
"""How deep objects within objects are looked into."""


class HeldForm(NamedTuple):
    """What is compared of a value: what it is, and its text or a digest."""

    what: str
    held: str

    @property
    def fits_a_buffer(self) -> bool:
        return self.what in ("a tensor", "a number", "an array")


_NOTHING, _UNKNOWN = HeldForm("a value", repr(None)), HeldForm("something else", "")


class HeldState:
    """What ``values()`` yields by name, as it is now.

    Numbers, texts, arrays and tensors, also within collections and objects of the packages of ``kinds``, must stay as
    they are. What ``method`` sets first, such as a size or an entry of a table, must stay from then on. ``kind`` names
    whose values they are in errors.
    """

    def __init__(
        self, kind: str, method: str, values: Callable[[], Iterable[tuple[str, Any]]], kinds: Iterable[type]
    ) -> None:
        self._kind, self._method, self._values, self._looks = kind, method, values, _Looks(_packages(kinds))
        self.note()

    @classmethod
    def of_model(cls, model: nn.Module, kind: str = "") -> HeldState:
        """Return what the modules of ``model`` keep beside its state dict, as their constructors left it."""

        def values() -> Iterator[tuple[str, Any]]:
            known = {id(value) for value in model.parameters()} | {id(value) for _, value in state_buffers(model)}
            for name, value in (*model.named_buffers(), *attributes(model)):
                if id(value) not in known:
                    yield name, value

        return cls(kind or type(model).__name__.removeprefix("FSDP"), "forward", values, map(type, model.modules()))

    def note(self) -> None:
        """Take the values as they are now for those that must stay."""
        self._first = dict(self._forms())

    def check(self) -> None:
        """Raise ``ValueError`` with the name of what has changed since."""
        for name, form in self._forms():
            if self._first.get(name, _NOTHING) == _NOTHING:
                self._first[name] = form
            elif form != self._first[name]:
                is_buffer = form.fits_a_buffer and self._method == "forward"
                advice = "; register_buffer makes it one that they hold" if is_buffer else ""
                what = f"{form.what} that {self._method} changes, which checkpoints do not hold{advice}"
                looked_at = f"what is only looked at may be None again when {self._method} returns"
                raise lost(self._kind, name, f"{what}; {looked_at}")

    def _forms(self) -> Iterator[tuple[str, HeldForm]]:
        for name, value in self._values():
            yield from self._looks.forms(name, value)


@dataclass(frozen=True)
class _Looks:
    """Looks into collections, and into objects of these packages."""

    packages: frozenset[str]

    def entries(self, value: object) -> dict[str, Any] | None:
        """Return the entries of a table or of an object by what follows its name; ``None`` for anything else."""
        if isinstance(value, dict):
            return {f"[{key!r}]": each for key, each in value.items()}
        if isinstance(value, nn.Module | Tensor | type) or not hasattr(value, "__dict__"):
            return None
        is_own = isinstance(value, SimpleNamespace) or _package(type(value)) in self.packages
        return {f".{key}": each for key, each in vars(value).items()} if is_own else None

    def within(self, name: str, value: object, seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
        """Yield what lies in a value, at any depth, by name; tables and objects by their entries."""
        entries = self.entries(value)
        if entries is None or id(value) in seen or len(seen) > _DEEPEST:
            yield name, value
            return
        for key, each in entries.items():
            yield from self.within(name + key, each, seen | {id(value)})

    def forms(self, name: str, value: object) -> Iterator[tuple[str, HeldForm]]:
        yield from ((leaf, self._form(each)) for leaf, each in self.within(name, value))

    def _form(self, value: object, depth: int = 0) -> HeldForm:
        if isinstance(value, Tensor):
            is_plain = type(value) is Tensor and value.layout == torch.strided and not value.is_nested
            return HeldForm("a tensor", digest(value)) if is_plain and not value.is_meta else _UNKNOWN
        if isinstance(value, np.ndarray):
            if isinstance(value, np.memmap) or value.dtype.hasobject:
                return _UNKNOWN
            held = hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()
            return HeldForm("an array", f"{value.shape} {value.dtype} {held}")
        if isinstance(value, _PLAIN):
            return HeldForm("a number" if isinstance(value, _NUMBERS) else "a value", repr(value))
        if not isinstance(value, list | tuple | deque | set | frozenset) or depth > _DEEPEST:
            return _UNKNOWN
        return HeldForm("a collection", self._digest_of_all(value, depth))

    def _digest_of_all(self, values: Collection[Any], depth: int) -> str:
        ordered = sorted(values, key=repr) if isinstance(values, set | frozenset) else list(values)
        if all(isinstance(each, _PLAIN) for each in ordered):
            return hashlib.sha256(repr(ordered).encode()).hexdigest()
        held = hashlib.sha256()
        for place, each in enumerate(ordered):
            for name, leaf in self.within(str(place), each):
                held.update(f"{name} {self._form(leaf, depth + 1)}".encode())
        return held.hexdigest()


def check_attributes(network: nn.Module) -> None:
    """Raise ``ValueError`` for state beside parameters and buffers that cannot be compared: a module's own
    serialisation, a generator of random numbers, an iterator.
    """
    kind, looks = type(network).__name__, _Looks(_packages(map(type, network.modules())))
    for name, module in network.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(f"{name or kind} has get_extra_state: checkpoints hold tensors alone")
    for name, value in attributes(network):
        for leaf, each in looks.within(name, value):
            for one in each if isinstance(each, list | tuple) else (each,):
                if isinstance(one, _GENERATORS):
                    raise lost(kind, leaf, "a generator of random numbers, which a resumed run would begin anew")
                if isinstance(one, Iterator):
                    raise lost(kind, leaf, "an iterator, which a resumed run would begin anew; make it in forward")


def attributes(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what the modules' own code has set beside parameters, buffers and modules, by qualified name."""
    for prefix, module in network.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                yield f"{prefix}.{name}" if prefix else name, value


def digest(value: Tensor) -> str:
    """Return a digest of a tensor's type, shape and bits."""
    bits = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode() + bits.numpy().tobytes()).hexdigest()


def lost(kind: str, name: str, what: str) -> ValueError:
    return ValueError(f"the attribute {name!r} of {kind} is {what}")


def _packages(kinds: Iterable[type]) -> frozenset[str]:
    """Return the packages of these classes and their bases: sharding and recomputation make classes of their own."""
    bases = {base for kind in kinds for base in kind.__mro__}
    return frozenset(map(_package, bases)) - _OF_OTHERS


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
