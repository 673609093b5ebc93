"""Reading VNN-LIB 1 (https://www.vnnlib.org).

The file declares reals ``X_i`` and ``Y_j``, as ``(declare-const X_0 Real)`` or ``(declare-fun X_0 () Real)``, and
asserts ``<=`` and ``>=`` between sums of them and numbers, under ``and`` and ``or`` nested to any depth, of inputs and
outputs alike. All assertions together hold for a counterexample; the property holds if there is none. Numbers are the
rationals that their decimals say, and are added and multiplied without rounding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from math import prod

from service.formats.vnnlib.boxes import Conditions, InputIntervals
from service.formats.vnnlib.query import Query, VnnlibError
from service.formats.vnnlib.terms import (
    MOST_BITS,
    Expression,
    LinearConstraint,
    Token,
    Tree,
    first,
    number,
    total,
    trees,
)

_VARIABLE = re.compile(r"([XY])_(\d{1,9})", re.ASCII)
MOST_DISJUNCTS = 100_000
MOST_COMPARISONS = 2_000_000
"""Comparisons in the disjuncts of all disjunctions that multiply, counted as often as they are repeated."""
MOST_ENDS = 20_000_000
"""Numbers in the boxes of all disjuncts together."""

_STATEMENTS = "declare-const, declare-fun or assert"
Conjunction = tuple[LinearConstraint, ...]
ONE, MINUS_ONE = Fraction(1), Fraction(-1)


@dataclass(frozen=True)
class _Declared:
    """Indices of each name with the lines of their declarations."""

    lines: dict[str, dict[int, int]] = field(default_factory=lambda: {"X": {}, "Y": {}})

    def count(self, name: str) -> int:
        known = self.lines[name]
        missing = next(index for index in range(len(known) + 1) if index not in known)
        if not known or missing < len(known):
            line = max(known.values(), default=1)
            raise VnnlibError(f"line {line}: {name}_{missing} is not declared, expected {name}_0, {name}_1, … gapless")
        return len(known)


@dataclass
class _Expansion:
    """Counts the comparisons that the products of disjunctions of one file have so far."""

    comparisons: int = 0

    def check(self, parts: Sequence[Sequence[Conjunction]], near: Token) -> None:
        """Raise :class:`VnnlibError` where the product of these alternatives is too large, before it is made."""
        disjuncts = prod(len(part) for part in parts)
        if disjuncts > MOST_DISJUNCTS:
            many = disjuncts if disjuncts < 10**12 else "very many"
            message = f"the disjunctions multiply to {many} cases, at most {MOST_DISJUNCTS} are supported"
            raise VnnlibError(f"line {near.line}: {message}")
        if not disjuncts or all(len(part) == 1 for part in parts):
            return
        self.comparisons += sum(sum(len(each) for each in part) * (disjuncts // len(part)) for part in parts)
        if self.comparisons > MOST_COMPARISONS:
            message = f"the disjunctions multiply to more than {MOST_COMPARISONS} comparisons"
            raise VnnlibError(f"line {near.line}: {message}, counted as often as cases repeat them")


def parse(text: str) -> Query:
    """Parse a file's text into its query. Raises :class:`VnnlibError`."""
    declared, expansion = _Declared(), _Expansion()
    assertions: list[list[Conjunction]] = []
    for tree in trees(text):
        _statement(tree, declared, expansion, assertions)
    inputs, outputs = declared.count("X"), declared.count("Y")
    if not assertions:
        raise VnnlibError("line 1: the file asserts nothing, expected at least one (assert …)")
    alternatives = [each for each in assertions if len(each) != 1]
    common = [linear for each in assertions if len(each) == 1 for linear in each[0]]
    expansion.check(alternatives, Token("assert", 1))
    shared = Conditions(InputIntervals(declared.lines["X"])).adding(common)
    found, boxes = [], 0
    for parts in product(*alternatives):
        chosen = shared.adding([linear for part in parts for linear in part])
        if not chosen.empty:
            found.append(chosen.disjunct())
            boxes += chosen.ends is not shared.ends
            if boxes * inputs > MOST_ENDS:
                raise VnnlibError(f"line 1: the disjunctions need more than {MOST_ENDS} numbers for their input boxes")
    return Query(inputs, outputs, tuple(found))


def _statement(
    tree: list[Tree], declared: _Declared, expansion: _Expansion, assertions: list[list[Conjunction]]
) -> None:
    head, rest = (tree[0] if tree else []), tree[1:]
    if not isinstance(head, Token):
        raise first(tree).refuse(_STATEMENTS)
    if head.text == "assert":
        if len(rest) != 1:
            raise head.refuse(f"one formula, not {len(rest)},")
        assertions.append(_formula(rest[0], declared, expansion, head))
    elif head.text in ("declare-const", "declare-fun"):
        name, index = _declaration(head, rest)
        if index in declared.lines[name]:
            first_at = declared.lines[name][index]
            raise head.refuse(f"one declaration of {name}_{index}, which line {first_at} declares,")
        declared.lines[name][index] = head.line
    else:
        raise head.refuse(_STATEMENTS)


def _declaration(head: Token, rest: Sequence[Tree]) -> tuple[str, int]:
    """Parse ``X_i Real`` after ``declare-const``, or ``X_i () Real`` after ``declare-fun``: a name and its index."""
    variable, *kind = rest or [head]
    match = _VARIABLE.fullmatch(variable.text) if isinstance(variable, Token) else None
    if match is None:
        raise first([variable, head]).refuse("a name X_i or Y_i")
    if head.text == "declare-fun":
        if not kind or kind[0] != []:
            raise first([*kind, head]).refuse(
                f"() after {match.group()}, since a variable takes no arguments, and Real"
            )
        kind = kind[1:]
    sort = kind[0] if kind else variable
    if not isinstance(sort, Token) or sort.text != "Real":
        raise first([sort, head]).refuse(f"Real, the sort of {match.group()}")
    if len(kind) > 1:
        raise first([*kind[1:], head]).refuse("nothing after Real")
    return match.group(1), int(match.group(2))


def _formula(tree: Tree, declared: _Declared, expansion: _Expansion, near: Token) -> list[Conjunction]:
    """Parse a formula into disjunctive normal form; ``near`` stands in a message for what is empty."""
    if isinstance(tree, Token) or not tree or not isinstance(tree[0], Token):
        raise first([tree, near]).refuse("(and …), (or …), (<= …) or (>= …)")
    head, rest = tree[0], tree[1:]
    if head.text == "or":
        return [conjunction for part in rest for conjunction in _formula(part, declared, expansion, head)]
    if head.text == "and":
        parts = [_formula(part, declared, expansion, head) for part in rest]
        expansion.check(parts, head)
        return [tuple(linear for each in chosen for linear in each) for chosen in product(*parts)]
    if head.text in ("<=", ">="):
        if len(rest) != 2:
            raise head.refuse(f"two sides, not {len(rest)}, for the comparison")
        low, high = (rest[0], rest[1]) if head.text == "<=" else (rest[1], rest[0])
        difference = total([_expression(low, declared, head), _expression(high, declared, head).times(MINUS_ONE)])
        return [(LinearConstraint.of(difference, head),)]
    raise head.refuse("and, or, <= or >=")


def _expression(tree: Tree, declared: _Declared, near: Token) -> Expression:
    if isinstance(tree, Token):
        match = _VARIABLE.fullmatch(tree.text)
        if match is None:
            return Expression({}, number(tree))
        name, index = match.group(1), int(match.group(2))
        if index not in declared.lines[name]:
            raise tree.refuse("a variable that is declared above")
        return Expression({(name, index): ONE})
    if not tree or not isinstance(tree[0], Token) or len(tree) < 2:
        raise first([tree, near]).refuse("a number, a variable, (+ …), (- …) or (* …)")
    head, parts = tree[0], [_expression(part, declared, tree[0]) for part in tree[1:]]
    if head.text == "*":
        return _product(head, parts)
    if head.text == "-":
        kept = parts[:1] if len(parts) > 1 else []
        return total([*kept, *(part.times(MINUS_ONE) for part in parts[len(kept) :])])
    if head.text != "+":
        raise head.refuse("+, - or *")
    return total(parts)


def _product(head: Token, parts: Sequence[Expression]) -> Expression:
    found = Expression({}, ONE)
    for part in parts:
        if found.terms and part.terms:
            raise head.refuse("a product with at most one variable")
        found = part.times(found.constant) if part.terms else found.times(part.constant)
        if found.bits > MOST_BITS:
            raise head.refuse(f"a product of at most {MOST_BITS} bits")
    return found
