"""Tokens of VNN-LIB, and exact linear arithmetic on inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import inf, nextafter
from sys import float_info
from typing import NamedTuple

from service.formats.vnnlib.query import Number, VnnlibError

_TOKEN = re.compile(
    r"\((<=|>=|<|>)[ \t]+([XY])_(\d{1,9})[ \t]+([+-]?\d[\d.eE+-]*|[XY]_\d{1,9})[ \t]*\)|[()]|[^\s();]+|;[^\n]*|\n",
    re.ASCII,
)
"""A comparison of a variable with a number or with another variable is one token: large files have little else."""
STATEMENTS = "declare-const, declare-fun or assert"
DEEPEST = 100
"""Brackets within brackets: no real property comes near, and the reader recurses for each."""


class Token(NamedTuple):
    text: str
    line: int

    def refuse(self, expected: str) -> VnnlibError:
        shown = self.text if len(self.text) <= 60 else f"{self.text[:60]}…"
        return VnnlibError(f"line {self.line}: got {shown!r}, expected {expected}")


class SimpleComparison(NamedTuple):
    """``(head name_place other)``, where the other side is the text of a number or of a variable."""

    head: Token
    name: str
    place: str
    other: str


Tree = Token | SimpleComparison | list["Tree"]


def trees(text: str) -> Iterator[list[Tree]]:
    """Yield top-level expressions, one at a time: files of thousands of lines never become one tree."""
    stack: list[list[Tree]] = []
    opened: list[Token] = []
    line = 1
    for match in _TOKEN.finditer(text):
        part = match.group()
        if part == "\n":
            line += 1
        elif part in "()":
            if (done := _bracket(Token(part, line), stack, opened)) is not None:
                yield done
        elif not part.startswith(";"):
            head, name, index, other = match.groups()
            leaf = Token(part, line) if head is None else SimpleComparison(Token(head, line), name, index, other)
            if not stack:
                raise first([leaf]).refuse("'('" if head is None else STATEMENTS)
            stack[-1].append(leaf)
    if opened:
        raise VnnlibError(f"line {opened[-1].line}: got '(' that nothing closes, expected ')'")


def _bracket(token: Token, stack: list[list[Tree]], opened: list[Token]) -> list[Tree] | None:
    """Open or close a bracket; return a top-level expression that it ends."""
    if token.text == "(":
        if len(stack) == DEEPEST:
            raise token.refuse(f"at most {DEEPEST} brackets within each other")
        stack.append([])
        opened.append(token)
        return None
    if not stack:
        raise token.refuse("no closing bracket here")
    done = stack.pop()
    opened.pop()
    if not stack:
        return done
    stack[-1].append(done)
    return None


def first(tree: Sequence[Tree | None]) -> Token:
    """Return the first token within, for a message."""
    return next(_tokens(tree), Token("()", 0))


def _tokens(tree: Sequence[Tree | None]) -> Iterator[Token]:
    for part in tree:
        if isinstance(part, Token):
            yield part
        elif isinstance(part, SimpleComparison):
            yield part.head
        elif part:
            yield from _tokens(part)


_NUMBER = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?(?:[eE]([+-]?\d+))?", re.ASCII)
MOST_DIGITS, MOST_EXPONENT = 1000, 1000
"""The most digits, and the largest exponent, of a number's text. Every float64 is far within; larger numbers are never
built.
"""
MOST_BITS = 2**15
"""The most bits of a product's numerator, and of its denominator."""
ZERO = Fraction(0)


@dataclass(frozen=True)
class Expression:
    """``Σ terms + constant``, by variable, exactly; one whose terms cancel has them with the factor 0."""

    terms: Mapping[tuple[str, int], Fraction]
    constant: Fraction = ZERO

    def times(self, factor: Fraction) -> Expression:
        if factor == 1:
            return self
        if factor == -1:  # as of one side of each comparison
            return Expression({name: -each for name, each in self.terms.items()}, -self.constant)
        return Expression({name: factor * each for name, each in self.terms.items()}, factor * self.constant)

    @property
    def bits(self) -> int:
        """Return the bits of the longest of its numerators and denominators."""
        numbers = (self.constant, *self.terms.values())
        return max(max(each.numerator.bit_length(), each.denominator.bit_length()) for each in numbers)


def total(parts: Sequence[Expression]) -> Expression:
    """Return the sum of one or more expressions."""
    terms, constant = dict(parts[0].terms), parts[0].constant
    for part in parts[1:]:
        constant = constant + part.constant if constant else part.constant
        for name, factor in part.terms.items():
            terms[name] = terms[name] + factor if name in terms else factor
    return Expression(terms, constant)


class LinearConstraint(NamedTuple):
    """``Σ terms ≤ threshold``, ``<`` if it is ``strict``; no factor is 0. ``token`` is its origin in the file."""

    terms: tuple[tuple[str, int, Fraction], ...]
    threshold: Fraction
    token: Token
    strict: bool = False

    @classmethod
    def of(cls, expression: Expression, token: Token, strict: bool = False) -> LinearConstraint:
        """Return the constraint that the expression is at most 0, or less."""
        terms = tuple((name, index, factor) for (name, index), factor in expression.terms.items() if factor)
        return cls(terms, -expression.constant, token, strict)


def number(token: Token) -> Fraction:
    """Parse a decimal number. Raises :class:`VnnlibError` for another token, and for one that is very long."""
    found = _parsed(token.text)
    if isinstance(found, str):
        raise token.refuse(found)
    return found


@lru_cache(maxsize=2**12)
def _parsed(text: str) -> Fraction | str:
    """Return the number, or what is expected instead; files repeat many numbers."""
    match = _NUMBER.fullmatch(text)
    sign, whole, part, exponent = match.groups() if match else ("", "", "", "")
    digits = f"{whole or ''}{part or ''}"
    if not digits:
        return "a number, X_i or Y_i"
    shown = (exponent or "").lstrip("+-0")
    if len(digits) > MOST_DIGITS or len(shown) > len(str(MOST_EXPONENT)) or int(shown or 0) > MOST_EXPONENT:
        expected = f"a number of at most {MOST_DIGITS} digits and an exponent of at most {MOST_EXPONENT}"
        return f"{expected} above or below 0"
    power = int(exponent or 0) - len(part or "")
    value = int(f"{sign}{digits}")
    return Fraction(value * 10**power) if power >= 0 else Fraction(value, 10**-power)


def rounded_up(value: Number) -> float:
    """Return the least float64 that is not below a rational number: infinite if none is as large."""
    if isinstance(value, float):
        return value
    try:
        nearest = float(value)
    except OverflowError:
        return inf if value > 0 else -float_info.max
    return nextafter(nearest, inf) if nearest < value else nearest


def rounded_down(value: Number) -> float:
    """Return the greatest float64 that is not above a rational number: infinite if none is as small."""
    return -rounded_up(-value)
