"""Finds which local variables of a function are read again after the instruction at which it stands."""

from __future__ import annotations

import dis
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

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
    """Return whether a way on from ``instruction`` (``frame.f_lasti``) reads the variable before it is set anew.

    All branches count, and handlers of exceptions; but that a ``with`` takes an exception away does not.
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
