"""What a file of VNN-LIB 2 declares: networks with their tensors, and the places of the tensors' entries in a query.

The inputs of all networks lie side by side in the order of their declarations, and so do hidden values and outputs;
each tensor's entries are in C order.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import mul
from typing import ClassVar, Literal

from service.formats.vnnlib.formulas import RELATIONS
from service.formats.vnnlib.terms import SimpleComparison, Token

Role = Literal["input", "hidden", "output"]
Relation = Literal["equal-to", "isomorphic-to"]
REAL, FLOATS = "real", frozenset({"float16", "bfloat16", "float32", "float64"})
INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
MOST_ENTRIES = 2**24
"""The most entries of a tensor: no network that is read has more."""
KNOWN = "a variable that is declared above"
_NAME = r"[A-Za-z][\w-]*"
_PLACES = r"\[[\d, \t]*\]"
_NUMBER = r"[+-]?\d[\d.eE+-]*"
_TOKEN = re.compile(
    rf"\((<=|>=|<|>)[ \t]+({_NAME})(?:[ \t]*({_PLACES}))?[ \t]+({_NUMBER}|{_NAME}(?:[ \t]*{_PLACES})?)[ \t]*\)"
    rf"|[()]|\n|;[^\r\n]*|\"[^\"\n]*\"|{_NAME}(?:[ \t]*{_PLACES})?|[^\s();\"]+|\"",
    re.ASCII,
)
"""A comparison of a variable with a number or with another variable is one token, as in version 1."""
_VARIABLE = re.compile(rf"({_NAME})(?:[ \t]*({_PLACES}))?", re.ASCII)
_LETTERS = {"input": "X", "hidden": "Y", "output": "Y"}


@dataclass(frozen=True)
class DeclaredTensor:
    """A tensor of a network. ``kind`` is its element type as the file spells it; ``value`` names a hidden value in the
    ONNX file.
    """

    name: str
    role: Role
    kind: str
    shape: tuple[int, ...]
    line: int
    value: str = ""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_real(self) -> bool:
        return self.kind.lower() == REAL


@dataclass(frozen=True)
class DeclaredNetwork:
    """A network, perhaps the same as ``other``, or one of its structure."""

    name: str
    tensors: tuple[DeclaredTensor, ...]
    line: int
    relation: Relation | None = None
    other: str = ""

    def having(self, *roles: Role) -> tuple[DeclaredTensor, ...]:
        return tuple(each for each in self.tensors if each.role in roles)


class EntryLines(Mapping[int, int]):
    """The line of each entry's declaration, by its place; large tensors take no memory."""

    def __init__(self) -> None:
        self._starts, self._tensors, self._total = list[int](), list[DeclaredTensor](), 0

    def add(self, tensor: DeclaredTensor) -> int:
        """Put a tensor behind the others; return the place of its first entry."""
        start = self._total
        if tensor.size:
            self._starts.append(start)
            self._tensors.append(tensor)
        self._total += tensor.size
        return start

    def shown(self, place: int) -> str:
        """Return an entry as the file spells it."""
        at = bisect_right(self._starts, place) - 1
        tensor, rest, indices = self._tensors[at], place - self._starts[at], list[int]()
        for length in reversed(tensor.shape):
            rest, index = divmod(rest, length)
            indices.append(index)
        return tensor.name + (f"[{','.join(map(str, reversed(indices)))}]" if indices else "")

    def __contains__(self, place: object) -> bool:
        return isinstance(place, int) and 0 <= place < self._total

    def __getitem__(self, place: int) -> int:
        if place not in self:
            raise KeyError(place)
        return self._tensors[bisect_right(self._starts, place) - 1].line

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._total))

    def __len__(self) -> int:
        return self._total


@dataclass
class Declarations:
    """What is declared so far; the scope and the spelling of all that follows."""

    networks: dict[str, DeclaredNetwork] = field(default_factory=dict)
    tensors: dict[str, tuple[DeclaredTensor, int]] = field(default_factory=dict)
    lines: dict[str, EntryLines] = field(default_factory=lambda: {"X": EntryLines(), "Y": EntryLines()})
    pattern, statements, tells_columns = _TOKEN, "vnnlib-version, declare-network or assert", True
    relations: ClassVar[Mapping[str, str]] = {**RELATIONS, "==": "=", "!=": "!="}

    def add(self, network: DeclaredNetwork) -> None:
        """Take up a network whose names are new."""
        self.networks[network.name] = network
        for tensor in network.tensors:
            self.tensors[tensor.name] = tensor, self.lines[_LETTERS[tensor.role]].add(tensor)

    def simple(self, match: re.Match[str], line: int, column: int) -> SimpleComparison:
        relation, name, places, other = match.groups()
        letter, place = self._find(Token(f"{name}{places or ''}", line, column), name, places)
        variable = self.variable(Token(other, line, column)) if other[0].isalpha() else None
        side = other if variable is None else f"{variable[0]}_{variable[1]}"
        return SimpleComparison(relation, line, letter, place, side, column)

    def variable(self, token: Token) -> tuple[str, int] | None:
        if not token.text[0].isalpha():
            return None
        match = _VARIABLE.fullmatch(token.text)
        if match is None:
            raise token.refuse(KNOWN)
        return self._find(token, *match.groups())

    def _find(self, token: Token, name: str, places: str | None) -> tuple[str, int]:
        if name not in self.tensors:
            raise token.refuse(KNOWN)
        tensor, start = self.tensors[name]
        indices = _numbers(places or "[]")
        if indices is None or len(indices) != len(tensor.shape) or any(map(int.__ge__, indices, tensor.shape)):
            raise token.refuse(f"{len(tensor.shape)} places within {shown_shape(tensor.shape)}, the shape of {name}")
        return _LETTERS[tensor.role], start + _flat(indices, tensor.shape)


def _flat(indices: tuple[int, ...], shape: tuple[int, ...]) -> int:
    place = 0
    for index, length in zip(indices, shape, strict=True):
        place = place * length + index
    return place


def _numbers(text: str) -> tuple[int, ...] | None:
    """Return the numbers of ``[1, 2]``; none if they are not what its brackets may hold."""
    inner = text[1:-1]
    if not inner.strip():
        return ()
    try:
        return tuple(map(int, inner.split(",")))
    except ValueError:
        return None


def shape_of(token: Token, text: str) -> tuple[int, ...]:
    """Parse a tensor's shape. Raises :class:`VnnlibError`, also for more entries than any network has."""
    shape = _numbers(text) if re.fullmatch(_PLACES, text, re.ASCII) else None
    if shape is None or 0 in shape:
        raise token.refuse("a shape such as [1,5], or [] for a number")
    if prod(shape) > MOST_ENTRIES:
        raise token.refuse(f"a shape of at most {MOST_ENTRIES} entries")
    return shape


def shown_shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def are_in_one_order(first: Sequence[int], second: Sequence[int]) -> bool:
    """Return whether tensors of these shapes, of as many entries, have them in the same places: but for axes of length
    1 the shapes are the same, or one of them has neighbouring axes of the other as one.
    """
    strides = [set(accumulate(reversed(shape), mul)) - {1} for shape in (first, second)]
    return strides[0] <= strides[1] or strides[1] <= strides[0]
