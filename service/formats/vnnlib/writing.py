"""Writes a query as VNN-LIB 1, number for number."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from service.formats.vnnlib.query import Disjunct, Halfspace, Number, Query


def written(query: Query) -> str:
    """Return the text of a query without a ball: :func:`~service.formats.vnnlib.parse` reads the same from it."""
    assert query.ball is None, "no text has a ball"
    names = (
        f"{letter}_{place}"
        for letter, count in zip("XY", (query.inputs, query.outputs), strict=True)
        for place in range(count)
    )
    lines = [f"(declare-const {name} Real)" for name in names]
    cases = ("\n  ".join(["(and", *_conditions(disjunct)]) + ")" for disjunct in query.disjuncts)
    return "\n".join([*lines, "(assert (or", *cases, "))\n"])


def _conditions(disjunct: Disjunct) -> Iterator[str]:
    for place, (low, high) in enumerate(zip(disjunct.lower, disjunct.upper, strict=True)):
        yield f"({'>' if place in disjunct.open_lower else '>='} X_{place} {_number(low)})"
        yield f"({'<' if place in disjunct.open_upper else '<='} X_{place} {_number(high)})"
    for letter, halfspaces in (("X", disjunct.constraints), ("Y", disjunct.halfspaces)):
        yield from (_comparison(letter, each) for each in halfspaces)


def _comparison(letter: str, halfspace: Halfspace) -> str:
    terms = " ".join(f"(* {_number(factor)} {letter}_{place})" for place, factor in halfspace.coefficients)
    return f"({'<' if halfspace.strict else '<='} (+ {terms}) {_number(halfspace.threshold)})"


def _number(value: Number) -> str:
    exact = Fraction(value)
    return str(exact.numerator) if exact.denominator == 1 else f"(/ {exact.numerator} {exact.denominator})"
