"""Tokens of VNN-LIB, and exact linear arithmetic on inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import inf, nextafter
from sys import float_info
from typing import NamedTuple, Protocol

from service.formats.vnnlib.query import Halfspace, Number, VnnlibError

_TOKEN = re.compile(
    r"\((<=|>=|<|>)[ \t]+([XY])_(\d{1,9})[ \t]+([+-]?\d[\d.eE+-]*|[XY]_\d{1,9})[ \t]*\)|[()]|\n|[^\s();]+|;[^\r\n]*",
    re.ASCII,
)
"""A comparison of a variable with a number or with another variable is one token: large files have little else."""
STATEMENTS = "declare-const, declare-fun or assert"
DEEPEST = 100
"""Brackets within brackets: no real property comes near, and the reader recurses for each."""


class Token(NamedTuple):
    text: str
    line: int
    column: int = 0
    """The first is 1; 0 stands for one that is not told."""

    def refuse(self, expected: str) -> VnnlibError:
        shown = self.text if len(self.text) <= 60 else f"{self.text[:60]}…"
        return VnnlibError(f"{self.where}: got {shown!r}, expected {expected}")

    @property
    def where(self) -> str:
        return f"line {self.line}, column {self.column}" if self.column else f"line {self.line}"


class SimpleComparison(NamedTuple):
    """``(relation name_place other)``, where the other side is the text of a number or of a variable."""

    relation: str
    line: int
    name: str
    place: int
    other: str
    column: int = 0

    @property
    def token(self) -> Token:
        return Token(self.relation, self.line, self.column)

    def refuse(self, expected: str) -> VnnlibError:
        return self.token.refuse(expected)


Tree = Token | SimpleComparison | list["Tree"]


class Spelling(Protocol):
    """How a version of the language spells its tokens; the first group of ``pattern`` is a simple relation.
    The declarations that have been read decide what a name means.
    """

    @property
    def pattern(self) -> re.Pattern[str]: ...

    @property
    def statements(self) -> str: ...

    @property
    def tells_columns(self) -> bool: ...

    def simple(self, match: re.Match[str], line: int, column: int) -> SimpleComparison: ...


class Spelling1:
    """Version 1: variables are ``X_i`` and ``Y_i``."""

    pattern, statements, tells_columns = _TOKEN, STATEMENTS, False

    def simple(self, match: re.Match[str], line: int, column: int) -> SimpleComparison:
        relation, name, index, other = match.groups()
        return SimpleComparison(relation, line, name, int(index), other, column)


def trees(text: str, spelling: Spelling) -> Iterator[list[Tree]]:
    """Yield top-level expressions, one at a time: files of thousands of lines never become one tree."""
    stack: list[list[Tree]] = []
    opened: list[Token] = []
    line, start, tells_columns = 1, -1, spelling.tells_columns
    for match in spelling.pattern.finditer(text):
        part, column = match.group(), match.start() - start if tells_columns else 0
        if part == "\n":
            line, start = line + 1, match.start()
        elif len(part) == 1 and part in "()":
            if (done := _bracket(Token(part, line, column), stack, opened)) is not None:
                yield done
        elif part[0] != ";":
            is_simple = match.group(1) is not None
            if not stack:
                found = Token(match.group(1) or part, line, column)
                raise found.refuse(spelling.statements if is_simple else "'('")
            stack[-1].append(spelling.simple(match, line, column) if is_simple else Token(part, line, column))
    if opened:
        raise VnnlibError(f"{opened[-1].where}: got '(' that nothing closes, expected ')'")


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
            yield part.token
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


class Expression(NamedTuple):
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


class InputBound(NamedTuple):
    """``X_place ≤ end`` if it is an upper one, or ``≥``; ``<`` or ``>`` if it is ``strict``. ``origin`` is its place in
    the file.
    """

    place: int
    is_upper: bool
    end: Fraction
    strict: bool
    origin: SimpleComparison | Token


class LinearConstraint(NamedTuple):
    """``Σ terms ≤ threshold``, ``<`` if it is ``strict``, of several inputs, of inputs and outputs, or of none; no
    factor is 0. ``origin`` as in :class:`InputBound`.
    """

    terms: tuple[tuple[str, int, Fraction], ...]
    threshold: Fraction
    strict: bool
    origin: SimpleComparison | Token


Constraint = InputBound | Halfspace | LinearConstraint
"""A halfspace is one of outputs."""


def constraint(
    terms: Sequence[tuple[str, int, Fraction]], threshold: Fraction, strict: bool, origin: SimpleComparison | Token
) -> Constraint:
    """Return the constraint that a sum of terms is at most the threshold, or less; no factor is 0."""
    names = {name for name, _, _ in terms}
    if names == {"Y"}:
        return Halfspace(tuple((index, factor) for _, index, factor in terms), threshold, strict)
    if names == {"X"} and len(terms) == 1:
        _, index, factor = terms[0]
        return InputBound(index, factor > 0, threshold / factor, strict, origin)
    return LinearConstraint(tuple(terms), threshold, strict, origin)


def number(token: Token) -> Fraction:
    """Parse a decimal number. Raises :class:`VnnlibError` for another text, and for one that is very long."""
    found = _parsed(token.text)
    if isinstance(found, str):
        raise token.refuse(found)
    return found


@lru_cache(maxsize=2**12)
def _parsed(text: str) -> Fraction | str:
    """Return the number, or what is expected instead; files repeat many numbers."""
    first, _, rest = text.partition(".")
    unsigned = (first[1:] if first[:1] in "+-" else first) + rest
    if unsigned.isascii() and unsigned.isdigit() and len(unsigned) <= MOST_DIGITS:  # as most are
        return Fraction(int(first + rest), 10 ** len(rest))
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
