"""Names the objects that keep a tensor's memory alive, in words: ``lens.hidden``, ``losses[3], a variable of step
(loop.py:7)``.

A local variable that is never read again holds nothing: a function's later reads follow from its bytecode.
"""

from __future__ import annotations

import dis
import gc
import inspect
import sys
import weakref
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import Tensor

from service.torch_internals.table import internal, internal_of

_LOCALS = frozenset({*dis.haslocal, *dis.hasfree})
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_ENDS = frozenset(
    {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
    | {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}
)
"""Instructions after which the next one does not follow."""
_SEES_ALL = frozenset({"locals", "vars", "dir", "eval", "exec"})
"""The functions that may read any variable of their caller."""


def is_read_again(code: CodeType, instruction: int, name: str) -> bool:
    """Return whether some path from ``instruction`` (``frame.f_lasti``) reads the variable before it is set anew.

    All branches count, and handlers of exceptions; the case that a ``with`` suppresses an exception does not.
    """
    known = _code(code)
    return known is None or name in known.after(instruction)


class _Code:
    """A function's instructions, each with the ``live`` variables before it."""

    def __init__(self, code: CodeType) -> None:
        self.instructions = list(dis.get_instructions(code))
        self.offsets = [each.offset for each in self.instructions]
        self._next = list(self._successors(_handlers(code, self._at)))
        self.live = self._before()

    def after(self, offset: int) -> frozenset[str]:
        """Return the live variables after the instruction at ``offset`` or, before the first, at the start."""
        if offset < 0:
            return self.live[0]
        return frozenset[str]().union(*(self.live[each] for each in self._next[self._at(offset)]))

    def _at(self, offset: int) -> int:
        """Return the number of the instruction at ``offset``, which may be in the cache that follows it."""
        return bisect_right(self.offsets, offset) - 1

    def _successors(self, handlers: Sequence[tuple[int, int, int]]) -> Iterator[list[int]]:
        for number, each in enumerate(self.instructions):
            found = [handler for start, end, handler in handlers if start <= each.offset < end]
            if each.opcode in _JUMPS:
                found.append(self._at(each.argval))
            if each.opname not in _ENDS and number + 1 < len(self.offsets):
                found.append(number + 1)
            yield found

    def _before(self) -> list[frozenset[str]]:
        """Follow all paths backwards until nothing changes."""
        changes = [_read_and_set(each) for each in self.instructions]
        sources: dict[int, list[int]] = defaultdict(list)
        for number, following in enumerate(self._next):
            for each in following:
                sources[each].append(number)
        live: list[frozenset[str]] = [frozenset()] * len(changes)
        waiting = list(range(len(changes)))
        while waiting:
            number = waiting.pop()
            read, replaced = changes[number]
            found = read | (frozenset[str]().union(*(live[each] for each in self._next[number])) - replaced)
            if found != live[number]:
                live[number] = found
                waiting.extend(sources[number])
        return live


@lru_cache(maxsize=512)
def _code(code: CodeType) -> _Code | None:
    """Return a function's code and live variables; ``None`` if others may read its variables."""
    return None if _SEES_ALL.intersection(code.co_names) else _Code(code)


def _handlers(code: CodeType, at: Callable[[int], int]) -> list[tuple[int, int, int]]:
    """Return where exceptions are caught, and the number of the instruction that then follows."""
    bytecode: Any = dis.Bytecode(code)  # typeshed lacks its entries, which Python 3.11 to 3.14 have
    names = [each.opname for each in bytecode]
    found = [(each.start, each.end, at(each.target)) for each in bytecode.exception_entries]
    return [each for each in found if "WITH_EXCEPT_START" not in names[each[2] : each[2] + 2]]


def _read_and_set(instruction: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Return the variables that an instruction reads, and those that it then sets or deletes."""
    if instruction.opcode not in _LOCALS:
        return frozenset(), frozenset()
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    if instruction.opname == "STORE_FAST_LOAD_FAST":
        return frozenset(names[1:]) - {names[0]}, frozenset(names[:1])
    if instruction.opname.startswith(("STORE_", "DELETE_")):
        return frozenset(), frozenset(names)
    return frozenset(names), frozenset()


_DEPTH = 5
"""The depth to which nested containers are followed."""
_NEAR, _LARGE = 3, 1024
"""The depth, and the size of one container, that every look before a replay stops at."""
_CONTAINERS = (list, tuple, dict, set, deque)
NAMES = 6
"""The most holders that are named of one tensor."""
_OWN_REFERENCES = 3
"""The references to a fresh snapshot of variables: the frame's, ours, and the one that asks."""


_MANAGER = "CUDAGraphNode"
"""CUDA graphs' manager, which keeps the tensors of its replays in any case."""
_COMPILER = ("torch._dynamo", "torch._functorch")
"""Compilers keep examples of a function's arguments here."""
FOREIGN = (
    str(torch.__path__[0]),
    "service/parallel/boundary/",
    "service/compilation/monitor/",
    "service/compilation/instruments/",
    "service/torch_internals/",
)
"""Folders without the program's own code; variables there are not the program's either."""


Known = Sequence[tuple[int, "weakref.ref[Tensor]"]]


@dataclass(frozen=True)
class _Holder:
    """Holds the ``path`` to a tensor, as ``scores[3]``, and where that begins, as ``, a variable of step (loop.py:7)``.

    ``named``: the path begins with a name, and not with the type of something that only the interpreter holds.
    ``dead``: it begins with a variable that is not read again before it is set anew.
    """

    path: str
    place: str = ""
    named: bool = True
    dead: bool = False

    def at(self, index: str) -> _Holder:
        return replace(self, path=f"{self.path}{index}")

    def __str__(self) -> str:
        return f"{self.path}{self.place}"


def tensors_of(storages: Set[int], known: Known = ()) -> dict[int, list[Tensor]]:
    """Return all tensors in each of these memories (``UntypedStorage._cdata``). Looks at every object of the process.

    ``known`` are tensors in them: one that CUDA graphs have invalidated does not tell where its memory is.
    """
    tensors: dict[int, list[Tensor]] = {storage: [] for storage in storages}
    for storage, reference in known:
        if (tensor := reference()) is not None:
            tensors[storage].append(tensor)
    tensor = None
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Tensor):
            place = _storage(candidate)
            if place in tensors and not any(each is candidate for each in tensors[place]):
                tensors[place].append(candidate)
    return tensors


def holders_of(
    tensors: Mapping[int, Sequence[Tensor]],
    names: Mapping[int, str],
    ignored: Sequence[Any] = (),
    *,
    read_again: bool = False,
) -> dict[int, tuple[str, ...]]:
    """Return the Python objects that hold the tensors in these memories, the result of ``tensors_of``.

    ``names`` are those of objects, by ``id``; others go by their type. References by ``ignored`` do not count. Tensors
    that only a CUDA graph holds are left out; those that only the autograd graph holds, or something else
    outside Python, have no holders. With ``read_again``, variables that are not read again do not count, and
    tensors without another holder are left out too.
    """
    search = _HolderSearch(names)
    found = {}
    for storage, own in tensors.items():
        passed = (tensors, own, *ignored)
        holders = dict.fromkeys(holder for tensor in own for holder in search.paths(tensor, passed, _DEPTH))
        counted = [holder for holder in holders if not (read_again and holder.dead)]
        others = [holder for holder in counted if not holder.path.startswith(_MANAGER)]
        named = sorted((holder for holder in others if holder.named), key=lambda holder: bool(holder.place)) or others
        beyond = not holders if len(counted) == len(holders) else _held_beyond(storage, own)
        if named or beyond:
            found[storage] = tuple(dict.fromkeys(map(str, named)))[:NAMES]
    return found


def read_again_of(storages: Set[int]) -> set[int]:
    """Return which of these memories variables hold, alone or in containers, that functions now running read again."""
    found: set[int] = set()
    for variable, value in _running():
        own = {_storage(tensor) for tensor in _reached(value, _NEAR)} & storages - found
        if own and not variable.is_dead:
            found |= own
    return found


def _reached(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in containers within containers, but not in large ones."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, _CONTAINERS) and len(value) <= _LARGE:
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for item in items:
            yield from _reached(item, depth - 1)


def _running() -> Iterator[tuple[_Variable, Any]]:
    """Yield the local variables that may hold tensors of the functions that now run, in all threads."""
    frames = list(sys._current_frames().values())
    while frames:
        frame = frames.pop()
        if frame.f_back is not None:
            frames.append(frame.f_back)
        code, instruction, values = frame.f_code, frame.f_lasti, list[tuple[str, Any]]()
        if code.co_flags & inspect.CO_OPTIMIZED and not any(each in code.co_filename for each in FOREIGN):
            values = _variables(frame)
        del frame  # one of them is this function's own: referring to itself, it would keep all variables alive
        for name, value in values:
            # A closed-over variable is found by its cell.
            if name not in code.co_freevars and isinstance(value, (Tensor, *_CONTAINERS)):
                yield _Variable(name, code, instruction), value


def _held_beyond(storage: int, tensors: Sequence[Tensor]) -> bool:
    """Return whether something besides these tensors' Python objects holds their memory, such as an autograd graph."""
    alone = torch.empty(0)
    bases = [id(internal_of(tensor, "torch.Tensor._base")) for tensor in tensors]
    uses = [internal_of(tensor, "torch.Tensor._use_count")() - bases.count(id(tensor)) for tensor in tensors]
    return max(uses, default=0) > 1 or _owners(storage) - len(tensors) > _owners(_storage(alone)) - 1


def _owners(storage: int) -> int:
    """Return the number of holders of the memory, this one included."""
    return int(internal("torch._C._storage_Use_Count")(storage))


def _storage(tensor: Tensor) -> int:
    try:
        return int(internal_of(tensor.untyped_storage(), "torch.UntypedStorage._cdata"))
    except (
        NotImplementedError,
        RuntimeError,
    ):  # functional and sparse tensors have no memory, invalidated ones hide it
        return -1


@dataclass
class _HolderSearch:
    """One look. ``variables`` are the local ones of the functions that now run, in all threads: ``gc`` does not see
    their frames.
    """

    names: Mapping[int, str]
    variables: dict[int, list[_Variable]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for variable, value in _running():
            self.variables.setdefault(id(value), []).append(variable)

    def paths(self, target: Any, ignored: Sequence[Any], depth: int) -> Iterator[_Holder]:
        """Yield ways to reach ``target``."""
        yield from (each.holder for each in self.variables.get(id(target), ()))
        if depth == 0:
            return
        skipped = {id(each) for each in ignored}
        referrers = [each for each in gc.get_referrers(target) if id(each) not in skipped and not inspect.isframe(each)]
        for referrer in referrers:
            yield from self._through(referrer, target, (*ignored, referrers), depth)

    def _through(self, referrer: Any, target: Any, ignored: Sequence[Any], depth: int) -> Iterator[_Holder]:
        """Yield paths through one object that refers to it."""
        if isinstance(referrer, GeneratorType):
            yield from _suspended(referrer, target)
        elif isinstance(referrer, dict):
            yield from self._through_dict(referrer, target, ignored, depth)
        elif isinstance(referrer, CellType):
            yield from _through_cell(referrer)
        elif isinstance(referrer, Sequence | Set) or hasattr(referrer, "maxlen"):
            position = next((index for index, item in enumerate(referrer) if item is target), None)
            yield from self._within(referrer, "" if position is None else f"[{position}]", ignored, depth)
        elif isinstance(referrer, Tensor):
            through = self.paths(referrer, ignored, depth - 1)
            yield from (replace(each, place=f"{each.place}, through a view") for each in through)
        elif not type(referrer).__module__.startswith(_COMPILER):
            yield _Holder(f"{self._name(referrer)}{_attribute(referrer, target)}")

    def _through_dict(
        self, referrer: Mapping[Any, Any], target: Any, ignored: Sequence[Any], depth: int
    ) -> Iterator[_Holder]:
        keys = [key for key, value in referrer.items() if value is target]
        if "__name__" in referrer and "__builtins__" in referrer:
            yield from (_Holder(f"{referrer['__name__']}.{key}") for key in keys)
            return
        owner = next((each for each in gc.get_referrers(referrer) if getattr(each, "__dict__", None) is referrer), None)
        if owner is not None:
            yield from (_Holder(f"{self._name(owner)}.{key}") for key in keys)
            return
        for key in keys:
            yield from self._within(referrer, f"[{key!r}]", ignored, depth)

    def _within(self, container: Any, index: str, ignored: Sequence[Any], depth: int) -> Iterator[_Holder]:
        """Yield a place in a container, under the container's own names, or its type if it has none."""
        found = list(self.paths(container, ignored, depth - 1))
        yield from (each.at(index) for each in found or [_Holder(type(container).__name__, named=False)])

    def _name(self, owner: Any) -> str:
        if isinstance(owner, type | ModuleType):
            return owner.__name__
        return self.names.get(id(owner)) or type(owner).__name__


def _variables(frame: FrameType) -> list[tuple[str, Any]]:
    variables = frame.f_locals
    found = list(variables.items())
    if sys.version_info < (3, 13) and sys.getrefcount(variables) <= _OWN_REFERENCES:
        # A snapshot, which the frame would keep, and with it every value, beyond the variable's own life. Not
        # so if the function has called ``locals()`` and uses the very same one.
        variables.clear()
    return found


@dataclass(frozen=True)
class _Variable:
    """Names a local variable of a function that stands at ``instruction``."""

    name: str
    code: CodeType
    instruction: int

    @property
    def is_dead(self) -> bool:
        return not is_read_again(self.code, self.instruction, self.name)

    @property
    def holder(self) -> _Holder:
        place = f", a variable of {self.code.co_name} ({self.code.co_filename}:{self.code.co_firstlineno})"
        return _Holder(self.name, place, dead=self.is_dead)


def _suspended(generator: GeneratorType[Any, Any, Any], target: Any) -> Iterator[_Holder]:
    """Yield the variables of a suspended generator; those of a running one are known already."""
    frame = generator.gi_frame
    if frame is not None and not generator.gi_running:
        own = (frame.f_code, frame.f_lasti)
        yield from (_Variable(name, *own).holder for name, value in _variables(frame) if value is target)


def _through_cell(cell: CellType) -> Iterator[_Holder]:
    for tuple_ in gc.get_referrers(cell):
        if isinstance(tuple_, tuple):
            for function in gc.get_referrers(tuple_):
                if isinstance(function, FunctionType) and function.__closure__ is tuple_:
                    free = zip(function.__code__.co_freevars, tuple_, strict=False)
                    place = f", a variable that {function.__qualname__} closes over"
                    yield from (_Holder(name, place) for name, each in free if each is cell)


def _attribute(owner: Any, target: Any) -> str:
    """Return ``.name`` of an object whose attributes have no dictionary of their own (slots, or compact instances)."""
    values = getattr(owner, "__dict__", {})
    for name, value in values.items():
        if value is target:
            return f".{name}"
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    return next((f".{name}" for name in slots if getattr(owner, name, None) is target), "")
