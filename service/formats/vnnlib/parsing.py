"""Reading VNN-LIB 1 (https://www.vnnlib.org).

The file declares reals ``X_i`` and ``Y_j``, as ``(declare-const X_0 Real)`` or ``(declare-fun X_0 () Real)``, and
asserts formulas of them (:mod:`service.formats.vnnlib.formulas`). All assertions together hold for a counterexample;
the property holds if there is none. What SMT-LIB has around them, as ``(check-sat)``, is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from service.formats.vnnlib.boxes import Conditions, InputIntervals
from service.formats.vnnlib.formulas import VARIABLE, Conjunction, Declared, Expansion, formula
from service.formats.vnnlib.query import Query, VnnlibError
from service.formats.vnnlib.terms import Token, Tree, first, trees

MOST_ENDS = 20_000_000
"""Numbers in the boxes of all disjuncts together."""

_STATEMENTS = "declare-const, declare-fun or assert"
_HEADERS = frozenset({"set-logic", "set-info", "set-option", "check-sat", "get-model", "get-value", "exit"})
"""Statements that say how to solve and what to print, and nothing about the query."""


def parse(text: str) -> Query:
    """Parse a file's text into its query. Raises :class:`VnnlibError`."""
    declared, expansion = Declared(), Expansion()
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
        disjunct = None if chosen.empty else chosen.disjunct()
        if disjunct is not None:
            found.append(disjunct)
            boxes += chosen.ends is not shared.ends or bool(chosen.constraints)
            if boxes * inputs > MOST_ENDS:
                raise VnnlibError(f"line 1: the disjunctions need more than {MOST_ENDS} numbers for their input boxes")
    return Query(inputs, outputs, tuple(found))


def _statement(tree: list[Tree], declared: Declared, expansion: Expansion, assertions: list[list[Conjunction]]) -> None:
    head, rest = (tree[0] if tree else []), tree[1:]
    if not isinstance(head, Token):
        raise first(tree).refuse(_STATEMENTS)
    if head.text == "assert":
        if len(rest) != 1:
            raise head.refuse(f"one formula, not {len(rest)},")
        assertions.append(formula(rest[0], declared, expansion, head))
    elif head.text in ("declare-const", "declare-fun"):
        name, index = _declaration(head, rest)
        if index in declared.lines[name]:
            first_at = declared.lines[name][index]
            raise head.refuse(f"one declaration of {name}_{index}, which line {first_at} declares,")
        declared.lines[name][index] = head.line
    elif head.text not in _HEADERS:
        raise head.refuse(_STATEMENTS)


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
