"""Records the calls of compiled modules, with their places and arguments, and the holders of results in memory."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from service.jobs.spec.compile import Phase
from service.parallel.boundary.holders import holders_of, tensors_of
from service.parallel.containers import tensors_in
from service.torch_internals.table import internal_of

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
    dtypes: tuple[torch.dtype, ...] = ()

    @property
    def shape(self) -> str:
        """Return the shapes in words, such as ``[6, 4] [4]``."""
        return " ".join(str(list(shape)) for shape in self.shapes)

    @property
    def dtype(self) -> str:
        """Return the types of the tensors in words, such as ``float32 int64``."""
        return " ".join(str(each).removeprefix("torch.") for each in self.dtypes)


class CallCounter:
    """Counts calls of modules, by how they were called; any thread may add."""

    def __init__(self) -> None:
        self._counts: Counter[Invocation] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, function: Callable[..., Any], arguments: Any) -> Invocation:
        tensors = tuple(tensors_in(arguments))
        invocation = Invocation(
            name,
            "train" if isinstance(function, nn.Module) and function.training else "inference",
            torch.is_grad_enabled(),
            threading.current_thread().name,
            tuple(map(_shape_of, tensors)),
            tuple(each.dtype for each in tensors),
        )
        with self._lock:
            self._counts[invocation] += 1
        return invocation

    def counts(self) -> dict[Invocation, int]:
        with self._lock:
            return dict(self._counts)


def caller(*, outside: tuple[str, ...]) -> CallSite:
    """Return the nearest frame above the caller whose file contains none of ``outside``."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_back is not None and _within(frame, outside):
        frame = frame.f_back
    assert frame is not None
    return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _within(frame: FrameType, parts: tuple[str, ...]) -> bool:
    return any(part in frame.f_code.co_filename for part in parts)


NOWHERE = -1
"""Stands for the address of a tensor that has no storage of its own, as sparse and nested ones: it is not watched."""
_NO_NAMES: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True)
class HeldResult:
    """A result that was alive when the step after its own had ended.

    ``holders`` are readable, such as ``Trainer.losses[3]``; none are known if only the autograd graph holds it.
    """

    origin: Origin
    shape: tuple[int, ...]
    dtype: str
    holders: tuple[str, ...]

    def __str__(self) -> str:
        by = " or by ".join(self.holders) or "the autograd graph, or something outside of Python"
        verb = "may be" if len(self.holders) > 1 else "is"
        return f"a result {list(self.shape)} of {self.origin}, {verb} held by {by}"


@dataclass(frozen=True)
class CallResult:
    """Identifies a result by its memory: views and detached tensors count as the result itself.

    ``returned``: the call returned it; else compiled code left it elsewhere, if only in the autograd graph.
    """

    storage: StorageWeakRef
    origin: Origin
    shape: tuple[int, ...]
    dtype: str
    tensor: weakref.ref[Tensor]
    returned: bool = True

    def held(self, tensors: Sequence[Tensor], holders: tuple[str, ...]) -> HeldResult:
        """Return it as held by ``holders``; for a result that was not returned, ``tensors`` in its memory tell the
        shape.
        """
        if self.returned or not tensors:
            return HeldResult(self.origin, self.shape, self.dtype, holders)
        return HeldResult(self.origin, _shape_of(tensors[0]), str(tensors[0].dtype), holders)

    @property
    def address(self) -> int:
        return int(self.storage.cdata)

    @property
    def alive(self) -> bool:
        return not self.storage.expired() or self._invalidated  # type: ignore[no-untyped-call]

    @property
    def _invalidated(self) -> bool:
        """Return whether a CUDA graph took the tensor's memory while it was recorded; reading it would raise."""
        tensor = self.tensor()
        try:
            return tensor is not None and tensor.untyped_storage() is None
        except RuntimeError:
            return True


class LiveResults:
    """Holds the results noted so far that are still in memory. Keeps none of them alive."""

    def __init__(self) -> None:
        self._outputs: list[CallResult] = []

    def note(
        self, origin: Origin, outputs: Iterable[Tensor], aliased: Iterable[Tensor] = (), *, returned: bool = True
    ) -> None:
        """Watch a call's outputs, except those in the memory of ``aliased``, the call's own inputs."""
        not_new = {NOWHERE, *map(address_of, aliased)}
        for output in outputs:
            if address_of(output) not in not_new:
                reference = StorageWeakRef(local(output).untyped_storage())  # type: ignore[no-untyped-call]
                shape, dtype = _shape_of(output), str(output.dtype)
                self._outputs.append(CallResult(reference, origin, shape, dtype, weakref.ref(local(output)), returned))

    def alive(self) -> tuple[CallResult, ...]:
        """Return those still in memory, oldest first; the others are forgotten."""
        self._outputs = [output for output in self._outputs if output.alive]
        return tuple(self._outputs)

    def forget(self, addresses: Container[int]) -> None:
        """Stop watching the results at these addresses."""
        self._outputs = [output for output in self._outputs if output.address not in addresses]

    def held(self, before: int) -> tuple[HeldResult, ...]:
        """Return live results of steps before ``before``, with holders. Looks at every object, for 0.1 s or more."""
        return _held_of([output for output in self.alive() if output.origin.step < before])


def _held_of(outputs: Sequence[CallResult]) -> tuple[HeldResult, ...]:
    """Return the holders of the outputs, if anything but the CUDA graph that made them holds them."""
    alive = [output for output in outputs if output.alive]
    return tuple(held for _, held in held_by_output(alive, located(alive)))


def located(outputs: Sequence[CallResult]) -> dict[int, list[Tensor]]:
    """Return all tensors in the memory of each output, by its address. Looks at every object of the process."""
    known = [(output.address, output.tensor) for output in outputs]
    return tensors_of({output.address for output in outputs}, known) if outputs else {}


def held_by_output(
    outputs: Sequence[CallResult],
    tensors: Mapping[int, Sequence[Tensor]],
    names: Mapping[int, str] = _NO_NAMES,
    ignored: Sequence[Any] = (),
    *,
    read_again: bool = False,
) -> list[tuple[CallResult, HeldResult]]:
    """Return the results of :func:`_held_of`, each with its output; ``tensors`` as :func:`located`, the rest as in
    ``holders_of``.

    One that was not returned is held only if its holders are known.
    """
    holders = holders_of(tensors, names, ignored, read_again=read_again) if tensors else {}
    return [
        (output, output.held(tensors[output.address], holders[output.address]))
        for output in outputs
        if output.address in holders and (holders[output.address] or output.returned)
    ]


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return its shape, with -1 where the parts of a nested tensor may differ; a strided one does not tell where."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return (-1,) * tensor.dim()
    return tuple(size if isinstance(size, int) else -1 for size in tensor.shape)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's memory of a distributed tensor, any other tensor as it is."""
    inner = getattr(tensor, "_local_tensor", None)
    return inner if isinstance(inner, Tensor) else tensor


def address_of(tensor: Tensor) -> int:
    """Return what tells its memory from any other, or ``NOWHERE``."""
    if tensor.layout is not torch.strided:
        return NOWHERE
    return int(internal_of(local(tensor).untyped_storage(), "torch.UntypedStorage._cdata"))
