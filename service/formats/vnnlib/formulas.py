"""Reads VNN-LIB 1 (https://www.vnnlib.org): statements, and formulas of both versions in disjunctive normal form.

The file declares reals ``X_i`` and ``Y_j``, as ``(declare-const X_0 Real)`` or ``(declare-fun X_0 () Real)``, and
asserts formulas of them. All assertions together hold for a counterexample; the property holds if there is none.
Statements of SMT-LIB that do not concern the query, such as ``(check-sat)``, are ignored.

``<=``, ``<``, ``>=``, ``>`` and ``=`` compare two or more sums of inputs, outputs and numbers; ``and``, ``or``, ``not``
and ``=>`` join comparisons to any depth. Numbers are exact rationals, and are added, multiplied and divided
without rounding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain, pairwise, product
from math import prod
from typing import Protocol

from service.formats.vnnlib.boxes import Conditions, InputIntervals
from service.formats.vnnlib.query import Halfspace, Query, VnnlibError
from service.formats.vnnlib.terms import (
    MOST_BITS,
    STATEMENTS,
    ZERO,
    Constraint,
    Expression,
    InputBound,
    SimpleComparison,
    Spelling1,
    Token,
    Tree,
    constraint,
    first,
    number,
    total,
    trees,
)

VARIABLE = re.compile(r"([XY])_(\d{1,9})", re.ASCII)
MOST_DISJUNCTS = 100_000
MOST_COMPARISONS = 2_000_000
"""The most comparisons in the disjuncts of all products of disjunctions, counted as often as they are repeated."""

Conjunction = tuple[Constraint, ...]
ONE, MINUS_ONE = Fraction(1), Fraction(-1)
DECLARED = "a variable that is declared above"
RELATIONS = {each: each for each in ("<=", "<", ">=", ">", "=")}
"""The relations of comparisons by their texts in version 1; there is also ``!=``."""


class Scope(Protocol):
    """The variables that are declared, inputs ``X`` and outputs ``Y``, each by an index, with the lines."""

    @property
    def lines(self) -> Mapping[str, Mapping[int, int]]: ...

    def variable(self, token: Token) -> tuple[str, int] | None:
        """Return the variable; ``None`` if the token cannot be one. Raises :class:`VnnlibError` if none is declared."""

    @property
    def relations(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Declared:
    """Indices of each name with the lines of their declarations."""

    lines: dict[str, dict[int, int]] = field(default_factory=lambda: {"X": {}, "Y": {}})
    relations: Mapping[str, str] = field(default_factory=RELATIONS.copy)

    def variable(self, token: Token) -> tuple[str, int] | None:
        match = VARIABLE.fullmatch(token.text)
        if match is None:
            return None
        name, index = match.group(1), int(match.group(2))
        if index not in self.lines[name]:
            raise token.refuse(DECLARED)
        return name, index

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
        """Raise :class:`VnnlibError` if the product of these alternatives is too large, before it is made; one that
        repeats nothing is not counted.
        """
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


def formula(tree: Tree, declared: Scope, expansion: Expansion, near: Token, holds: bool = True) -> list[Conjunction]:
    """Parse a formula, or its negation; a message about an empty formula points to ``near``."""
    if isinstance(tree, SimpleComparison):
        return [(_simple(tree, declared, holds),)]
    if isinstance(tree, Token) or not tree or not isinstance(tree[0], Token):
        raise first([tree, near]).refuse("(and …), (or …), (not …), (=> …) or a comparison, as (<= …)")
    head, rest = tree[0], tree[1:]
    if (relation := declared.relations.get(head.text)) is not None:
        sides = [_expression(part, declared, head) for part in rest]
        return _comparison(head, relation, sides, expansion, holds)
    if head.text in ("and", "or"):
        parts = [formula(part, declared, expansion, head, holds) for part in rest]
        return _combine(parts, (head.text == "or") is holds, expansion, head)
    if head.text == "not":
        return formula(only_formula(head, rest), declared, expansion, head, not holds)
    if head.text != "=>":
        raise head.refuse(f"and, or, not, => or one of {' '.join(declared.relations)}")
    if len(rest) < 2:
        raise head.refuse(f"two formulas, not {len(rest)},")
    premises = [formula(part, declared, expansion, head, not holds) for part in rest[:-1]]
    return _combine([*premises, formula(rest[-1], declared, expansion, head, holds)], holds, expansion, head)


def only_formula(head: Token, rest: Sequence[Tree]) -> Tree:
    """Return the formula after a word that takes one."""
    if len(rest) != 1:
        raise head.refuse(f"one formula, not {len(rest)},")
    return rest[0]


def _simple(tree: SimpleComparison, declared: Scope, holds: bool) -> Constraint:
    """Return what :func:`_comparison` gives for a variable and a number, or for two variables."""
    relation, line, name, index, other, column = tree
    if index not in declared.lines[name]:
        raise Token(f"{name}_{index}", line, column).refuse(DECLARED)
    is_upper, strict = (relation[0] == "<") is holds, (len(relation) == 1) is holds
    if other[0] not in "XY":
        value = number(Token(other, line, column))
        if name == "X":
            return InputBound(index, is_upper, value, strict, tree)
        return (
            Halfspace(((index, ONE),), value, strict) if is_upper else Halfspace(((index, MINUS_ONE),), -value, strict)
        )
    own, place = (name, index), (other[0], int(other[2:]))
    if place[1] not in declared.lines[place[0]]:
        raise Token(other, line, column).refuse(DECLARED)
    low, high = (own, place) if is_upper else (place, own)
    terms = [(*low, ONE), (*high, MINUS_ONE)] if own != place else []
    return constraint(terms, ZERO, strict, tree)


def _combine(parts: Sequence[list[Conjunction]], any_of: bool, expansion: Expansion, head: Token) -> list[Conjunction]:
    if any_of:
        return list(chain.from_iterable(parts))
    if not set(map(len, parts)) <= {1}:
        expansion.check(parts, head)
    return [tuple(chain.from_iterable(chosen)) for chosen in product(*parts)]


def _comparison(
    head: Token, relation: str, sides: Sequence[Expression], expansion: Expansion, holds: bool
) -> list[Conjunction]:
    """Compare each side with the next, as in SMT-LIB: ``(<= 0 X_0 1)``."""
    if len(sides) < 2:
        raise head.refuse(f"two sides, not {len(sides)}, for the comparison")
    if relation == "!=":
        if len(sides) > 2:
            raise head.refuse(f"two sides, not {len(sides)}, as what more of them mean is not defined,")
        return _comparison(head, "=", sides, expansion, not holds)
    ascending = sides[::-1] if relation.startswith(">") else sides
    parts = [_compare(head, relation, low, high, holds) for low, high in pairwise(ascending)]
    return _combine(parts, not holds, expansion, head)


def _compare(head: Token, relation: str, low: Expression, high: Expression, holds: bool) -> list[Conjunction]:
    def below(left: Expression, right: Expression, strict: bool) -> Conjunction:
        difference = total([left, right.times(MINUS_ONE)])
        terms = [(*variable, factor) for variable, factor in difference.terms.items() if factor]
        return (constraint(terms, -difference.constant, strict, head),)

    if relation == "=":
        if holds:
            return [below(low, high, False) + below(high, low, False)]
        return [below(low, high, True), below(high, low, True)]
    strict = relation in ("<", ">")
    return [below(low, high, strict) if holds else below(high, low, not strict)]


def _leaf(tree: Token, declared: Scope) -> Expression:
    variable = declared.variable(tree)
    return Expression({}, number(tree)) if variable is None else Expression({variable: ONE})


def _expression(tree: Tree, declared: Scope, near: Token) -> Expression:
    if isinstance(tree, Token):
        return _leaf(tree, declared)
    if isinstance(tree, SimpleComparison) or not tree or not isinstance(tree[0], Token) or len(tree) < 2:
        raise first([tree, near]).refuse("a number, a variable, (+ …), (- …), (* …) or (/ …)")
    if (term := _term(tree, declared)) is not None:
        return term
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


def _term(tree: list[Tree], declared: Scope) -> Expression | None:
    """Return ``(* number variable)`` at once, since large files have many."""
    if len(tree) != 3:
        return None
    head, factor, variable = tree
    if not (isinstance(head, Token) and isinstance(factor, Token) and isinstance(variable, Token)):
        return None
    if head.text != "*" or factor.text[0].isalpha() or (found := declared.variable(variable)) is None:
        return None
    return Expression({found: number(factor)})


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


MOST_ENDS = 20_000_000
"""The most numbers in the boxes of all disjuncts together."""

_HEADERS = frozenset({"set-logic", "set-info", "set-option", "check-sat", "get-model", "get-value", "exit"})
"""Statements about the solver and its output, not about the query."""


def read_version_1(text: str) -> Query:
    """Parse a file's text into its query. Raises :class:`VnnlibError`."""
    declared, expansion = Declared(), Expansion()
    assertions: list[list[Conjunction]] = []
    for tree in trees(text, Spelling1()):
        _statement(tree, declared, expansion, assertions)
    sizes = declared.count("X"), declared.count("Y")
    return combine(sizes, InputIntervals(declared.lines["X"]), assertions, expansion)


def combine(
    sizes: tuple[int, int], intervals: InputIntervals, assertions: Sequence[list[Conjunction]], expansion: Expansion
) -> Query:
    """Return the query in which all assertions hold, of so many inputs and outputs. Raises :class:`VnnlibError`."""
    if not assertions:
        raise VnnlibError("line 1: the file asserts nothing, expected at least one (assert …)")
    alternatives = [each for each in assertions if len(each) != 1]
    common = [linear for each in assertions if len(each) == 1 for linear in each[0]]
    expansion.check(alternatives, Token("assert", 1))
    shared = Conditions(intervals).adding(common)
    found, boxes = [], 0
    for parts in product(*alternatives):
        chosen = shared.adding([linear for part in parts for linear in part])
        disjunct = None if chosen.empty else chosen.disjunct()
        if disjunct is not None:
            found.append(disjunct)
            boxes += chosen.ends is not shared.ends or bool(chosen.constraints)
            if boxes * sizes[0] > MOST_ENDS:
                raise VnnlibError(f"line 1: the disjunctions need more than {MOST_ENDS} numbers for their input boxes")
    return Query(*sizes, tuple(found))


def _statement(tree: list[Tree], declared: Declared, expansion: Expansion, assertions: list[list[Conjunction]]) -> None:
    head, rest = (tree[0] if tree else []), tree[1:]
    if not isinstance(head, Token):
        raise first(tree).refuse(STATEMENTS)
    if head.text == "assert":
        assertions.append(formula(only_formula(head, rest), declared, expansion, head))
    elif head.text in ("declare-const", "declare-fun"):
        name, index = _declaration(head, rest)
        if index in declared.lines[name]:
            first_at = declared.lines[name][index]
            raise head.refuse(f"one declaration of {name}_{index}, which line {first_at} declares,")
        declared.lines[name][index] = head.line
    elif head.text not in _HEADERS:
        raise head.refuse(STATEMENTS)


def _declaration(head: Token, rest: Sequence[Tree]) -> tuple[str, int]:
    """Parse ``X_i Real`` after ``declare-const``, or ``X_i () Real`` after ``declare-fun``: a name and its index."""
    variable, *kind = rest or [head]
    match = VARIABLE.fullmatch(variable.text) if isinstance(variable, Token) else None
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
