"""Who keeps a tensor's memory alive, in words: ``Trainer.losses[3]``, ``local variable scores of step``."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

DEPTH = 5
"""Containers within containers that are followed."""
NAMES = 6
"""Holders named of one tensor."""
OWN_REFERENCES = 3
"""To a snapshot of variables that nobody has asked for: the frame's, ours, and that of the question."""


MANAGER = "CUDAGraphNode"
"""Keeps the tensors that its replays return, whether anybody else does or not."""


Known = Sequence[tuple[int, "weakref.ref[Tensor]"]]


def holders_of(storages: Set[int], known: Known = ()) -> dict[int, tuple[str, ...]]:
    """The Python objects that hold tensors in these memories (``UntypedStorage._cdata``).

    ``known`` are tensors in them: one that CUDA graphs have invalidated does not tell where its memory is.

    Those that nothing but a CUDA graph holds are left out; what only the autograd graph holds, or something else
    outside of Python, has no holders.
    """
    tensors: dict[int, list[Tensor]] = {}
    for storage, reference in known:
        if (tensor := reference()) is not None:
            tensors.setdefault(storage, []).append(tensor)
    tensor = None
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Tensor):
            place = _storage(candidate)
            if place in storages and not any(each is candidate for each in tensors.get(place, ())):
                tensors.setdefault(place, []).append(candidate)
    candidate = None
    frames = _Frames()
    found = {}
    for storage in storages:
        own = tensors.get(storage, [])
        paths = [path for tensor in own for path in _paths(tensor, frames, (tensors, own), DEPTH)]
        names = dict.fromkeys(path for path in paths if not path.startswith(MANAGER))
        if names or not paths:
            found[storage] = tuple(names)[:NAMES]
    return found


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # functional and sparse tensors have none, invalidated ones do not tell
        return -1


class _Frames:
    """Local variables of the functions that now run, in all threads. Their frames are invisible to ``gc``."""

    def __init__(self) -> None:
        self.names: dict[int, list[str]] = {}
        frames = list(sys._current_frames().values())
        while frames:
            frame = frames.pop()
            if frame.f_back is not None:
                frames.append(frame.f_back)
            if frame.f_code.co_filename != __file__ and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                self._note(frame)
            del frame  # one of them is this function's own: referring to itself, it would keep all variables alive

    def _note(self, frame: FrameType) -> None:
        variables = frame.f_locals
        for name, value in variables.items():
            if isinstance(value, Tensor | list | tuple | dict | set):
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self.names.setdefault(id(value), []).append(
                    f"local variable {name} of {frame.f_code.co_name} ({place})"
                )
        if sys.version_info < (3, 13) and sys.getrefcount(variables) <= OWN_REFERENCES:
            # A snapshot, which the frame would keep, and with it every value, beyond the variable's own life. Not so
            # where the function has called ``locals()`` and uses the very same one.
            variables.clear()


def _paths(target: Any, frames: _Frames, ignored: Sequence[Any], depth: int) -> Iterator[str]:
    """Names under which ``target`` can be reached."""
    yield from frames.names.get(id(target), ())
    if depth == 0:
        return
    skipped = {id(each) for each in ignored}
    referrers = [each for each in gc.get_referrers(target) if id(each) not in skipped and not _is_ours(each)]
    for referrer in referrers:
        yield from _through(referrer, target, frames, (*ignored, referrers), depth)


def _is_ours(referrer: Any) -> bool:
    return inspect.isframe(referrer) or inspect.isgenerator(referrer)


def _through(referrer: Any, target: Any, frames: _Frames, ignored: Sequence[Any], depth: int) -> Iterator[str]:
    """The names of ``target`` by way of one object that refers to it."""
    if isinstance(referrer, dict):
        yield from _through_dict(referrer, target, frames, ignored, depth)
    elif isinstance(referrer, CellType):
        yield from _through_cell(referrer)
    elif isinstance(referrer, Sequence | Set) or hasattr(referrer, "maxlen"):
        position = next((index for index, item in enumerate(referrer) if item is target), None)
        yield from _within(referrer, "" if position is None else f"[{position}]", frames, ignored, depth)
    elif isinstance(referrer, Tensor):
        yield from (f"{name}, through a view" for name in _paths(referrer, frames, ignored, depth - 1))
    else:
        attribute = _attribute(referrer, target)
        yield f"{type(referrer).__name__}{attribute}"


def _through_dict(
    referrer: Mapping[Any, Any], target: Any, frames: _Frames, ignored: Sequence[Any], depth: int
) -> Iterator[str]:
    keys = [key for key, value in referrer.items() if value is target]
    if "__name__" in referrer and "__builtins__" in referrer:
        yield from (f"{referrer['__name__']}.{key}" for key in keys)
        return
    owner = next((each for each in gc.get_referrers(referrer) if getattr(each, "__dict__", None) is referrer), None)
    if owner is not None:
        prefix = owner.__name__ if isinstance(owner, type | ModuleType) else type(owner).__name__
        yield from (f"{prefix}.{key}" for key in keys)
        return
    for key in keys:
        yield from _within(referrer, f"[{key!r}]", frames, ignored, depth)


def _within(container: Any, index: str, frames: _Frames, ignored: Sequence[Any], depth: int) -> Iterator[str]:
    """A place in a container, under the container's own names, or its type where it has none."""
    names = list(_paths(container, frames, ignored, depth - 1)) or [type(container).__name__]
    yield from (f"{name}{index}" for name in names)


def _through_cell(cell: CellType) -> Iterator[str]:
    for tuple_ in gc.get_referrers(cell):
        if isinstance(tuple_, tuple):
            for function in gc.get_referrers(tuple_):
                if isinstance(function, FunctionType) and function.__closure__ is tuple_:
                    free = zip(function.__code__.co_freevars, tuple_, strict=False)
                    yield from (f"variable {name} of {function.__qualname__}" for name, each in free if each is cell)


def _attribute(owner: Any, target: Any) -> str:
    """``.name`` of an object whose attributes have no dictionary of their own (slots, or compact instances)."""
    values = getattr(owner, "__dict__", {})
    for name, value in values.items():
        if value is target:
            return f".{name}"
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    return next((f".{name}" for name in slots if getattr(owner, name, None) is target), "")
