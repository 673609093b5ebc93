"""Formulas of VNN-LIB, in disjunctive normal form.

``<=``, ``<``, ``>=``, ``>`` and ``=`` compare two or more sums of inputs, outputs and numbers; ``and``, ``or``, ``not``
and ``=>`` join comparisons to any depth. Numbers are the rationals that their decimals say, and are added, multiplied
and divided without rounding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise, product
from math import prod

from service.formats.vnnlib.query import VnnlibError
from service.formats.vnnlib.terms import MOST_BITS, Expression, LinearConstraint, Token, Tree, first, number, total

VARIABLE = re.compile(r"([XY])_(\d{1,9})", re.ASCII)
MOST_DISJUNCTS = 100_000
MOST_COMPARISONS = 2_000_000
"""Comparisons in the disjuncts of all disjunctions that multiply, counted as often as they are repeated."""

Conjunction = tuple[LinearConstraint, ...]
ONE, MINUS_ONE = Fraction(1), Fraction(-1)
_COMPARISONS = ("<=", "<", ">=", ">", "=")


@dataclass(frozen=True)
class Declared:
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
class Expansion:
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


def formula(tree: Tree, declared: Declared, expansion: Expansion, near: Token, holds: bool = True) -> list[Conjunction]:
    """Parse a formula, or what it says where it does not hold; ``near`` stands in a message for what is empty."""
    if isinstance(tree, Token) or not tree or not isinstance(tree[0], Token):
        raise first([tree, near]).refuse("(and …), (or …), (not …), (=> …) or a comparison, as (<= …)")
    head, rest = tree[0], tree[1:]
    if head.text in _COMPARISONS:
        return _comparison(head, [_expression(part, declared, head) for part in rest], expansion, holds)
    if head.text in ("and", "or"):
        parts = [formula(part, declared, expansion, head, holds) for part in rest]
        return _joined(parts, (head.text == "or") is holds, expansion, head)
    if head.text == "not":
        if len(rest) != 1:
            raise head.refuse(f"one formula, not {len(rest)},")
        return formula(rest[0], declared, expansion, head, not holds)
    if head.text != "=>":
        raise head.refuse(f"and, or, not, => or one of {' '.join(_COMPARISONS)}")
    if len(rest) < 2:
        raise head.refuse(f"two formulas, not {len(rest)},")
    premises = [formula(part, declared, expansion, head, not holds) for part in rest[:-1]]
    return _joined([*premises, formula(rest[-1], declared, expansion, head, holds)], holds, expansion, head)


def _joined(parts: Sequence[list[Conjunction]], any_of: bool, expansion: Expansion, head: Token) -> list[Conjunction]:
    if any_of:
        return [conjunction for part in parts for conjunction in part]
    expansion.check(parts, head)
    return [tuple(linear for each in chosen for linear in each) for chosen in product(*parts)]


def _comparison(head: Token, sides: Sequence[Expression], expansion: Expansion, holds: bool) -> list[Conjunction]:
    """Compare each side with the next, as SMT-LIB has it: ``(<= 0 X_0 1)``."""
    if len(sides) < 2:
        raise head.refuse(f"two sides, not {len(sides)}, for the comparison")
    ascending = sides[::-1] if head.text.startswith(">") else sides
    parts = [_compared(head, low, high, holds) for low, high in pairwise(ascending)]
    return _joined(parts, not holds, expansion, head)


def _compared(head: Token, low: Expression, high: Expression, holds: bool) -> list[Conjunction]:
    def below(left: Expression, right: Expression, strict: bool) -> Conjunction:
        return (LinearConstraint.of(total([left, right.times(MINUS_ONE)]), head, strict),)

    if head.text == "=":
        if holds:
            return [below(low, high, False) + below(high, low, False)]
        return [below(low, high, True), below(high, low, True)]
    strict = head.text in ("<", ">")
    return [below(low, high, strict) if holds else below(high, low, not strict)]


def _expression(tree: Tree, declared: Declared, near: Token) -> Expression:
    if isinstance(tree, Token):
        match = VARIABLE.fullmatch(tree.text)
        if match is None:
            return Expression({}, number(tree))
        name, index = match.group(1), int(match.group(2))
        if index not in declared.lines[name]:
            raise tree.refuse("a variable that is declared above")
        return Expression({(name, index): ONE})
    if not tree or not isinstance(tree[0], Token) or len(tree) < 2:
        raise first([tree, near]).refuse("a number, a variable, (+ …), (- …), (* …) or (/ …)")
    head, parts = tree[0], [_expression(part, declared, tree[0]) for part in tree[1:]]
    if head.text == "*":
        return _product(head, parts)
    if head.text == "-":
        kept = parts[:1] if len(parts) > 1 else []
        return total([*kept, *(part.times(MINUS_ONE) for part in parts[len(kept) :])])
    if head.text == "/":
        return _quotient(head, parts)
    if head.text != "+":
        raise head.refuse("+, -, * or /")
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


def _quotient(head: Token, parts: Sequence[Expression]) -> Expression:
    if any(any(part.terms.values()) or not part.constant for part in parts[1:]):
        raise head.refuse("a quotient by numbers other than 0")
    return _product(head, [parts[0], *(Expression({}, 1 / part.constant) for part in parts[1:])])
