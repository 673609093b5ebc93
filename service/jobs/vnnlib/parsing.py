"""Reading VNN-LIB 1 (https://www.vnnlib.org).

The file declares reals ``X_i`` and ``Y_j`` and asserts ``<=`` and ``>=`` between sums of them and numbers, under
``and`` and ``or``. All assertions together hold for a counterexample; the property holds if there is none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import isfinite, prod

from service.jobs.vnnlib.boxes import Conditions, Ends
from service.jobs.vnnlib.query import Query, VnnlibError
from service.jobs.vnnlib.terms import Linear, Terms, collected
from service.jobs.vnnlib.tokens import Token, Tree, first, trees

_VARIABLE = re.compile(r"([XY])_(\d{1,9})")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
MOST_CASES = 100_000
MOST_ENDS = 20_000_000
"""Numbers in the boxes of all cases together."""

Conjunction = tuple[Linear, ...]


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


def parse(text: str) -> Query:
    """The query of a file's text. Raises :class:`VnnlibError`."""
    declared = _Declared()
    assertions: list[list[Conjunction]] = []
    for tree in trees(text):
        _statement(tree, declared, assertions)
    inputs, outputs = declared.count("X"), declared.count("Y")
    if not assertions:
        raise VnnlibError("line 1: the file asserts nothing, expected at least one (assert …)")
    alternatives = [each for each in assertions if len(each) != 1]
    common = [linear for each in assertions if len(each) == 1 for linear in each[0]]
    cases = prod(len(each) for each in alternatives)
    if cases > MOST_CASES:
        raise VnnlibError(f"line 1: the disjunctions multiply to {cases} cases, at most {MOST_CASES} are supported")
    shared = Conditions(Ends(declared.lines["X"])).adding(common)
    found, boxes = [], 0
    for parts in product(*alternatives):
        chosen = shared.adding([linear for part in parts for linear in part])
        if not chosen.empty:
            found.append(chosen.case())
            boxes += chosen.ends is not shared.ends
            if boxes * inputs > MOST_ENDS:
                raise VnnlibError(f"line 1: the disjunctions need more than {MOST_ENDS} numbers for their input boxes")
    return Query(inputs, outputs, tuple(found))


def _statement(tree: list[Tree], declared: _Declared, assertions: list[list[Conjunction]]) -> None:
    head, rest = (tree[0] if tree else []), tree[1:]
    if not isinstance(head, Token):
        raise first(tree).refuse("declare-const or assert")
    if head.text == "assert":
        if len(rest) != 1:
            raise head.refuse(f"one formula, not {len(rest)},")
        assertions.append(_formula(rest[0], declared, head))
    elif head.text in ("declare-const", "declare-fun"):
        name = rest[0] if rest else head
        match = _VARIABLE.fullmatch(name.text) if isinstance(name, Token) else None
        kind = rest[-1] if rest else head
        if match is None or not isinstance(kind, Token):
            raise first([name, head]).refuse("a name X_i or Y_i")
        if kind.text != "Real":
            raise kind.refuse("Real")
        declared.lines[match.group(1)][int(match.group(2))] = head.line
    else:
        raise head.refuse("declare-const or assert")


def _formula(tree: Tree, declared: _Declared, near: Token) -> list[Conjunction]:
    """In disjunctive normal form; ``near`` stands in a message for what is empty."""
    if isinstance(tree, Token) or not tree or not isinstance(tree[0], Token):
        raise first([tree, near]).refuse("(and …), (or …), (<= …) or (>= …)")
    head, rest = tree[0], tree[1:]
    if head.text == "or":
        return [conjunction for part in rest for conjunction in _formula(part, declared, head)]
    if head.text == "and":
        parts = [_formula(part, declared, head) for part in rest]
        if prod(len(part) for part in parts) > MOST_CASES:
            raise head.refuse(f"disjunctions that multiply to at most {MOST_CASES} cases, for what is below")
        return [tuple(linear for each in chosen for linear in each) for chosen in product(*parts)]
    if head.text in ("<=", ">="):
        if len(rest) != 2:
            raise head.refuse(f"two sides, not {len(rest)}, for the comparison")
        low, high = (rest[0], rest[1]) if head.text == "<=" else (rest[1], rest[0])
        terms, constant = _sum(low, declared, 1.0, head)
        others, offset = _sum(high, declared, -1.0, head)
        return [(Linear(collected([*terms, *others]), constant + offset, head),)]
    raise head.refuse("and, or, <= or >=")


def _sum(tree: Tree, declared: _Declared, factor: float, near: Token) -> tuple[Terms, float]:
    """An expression as terms and a constant, times ``factor``."""
    if isinstance(tree, Token):
        match = _VARIABLE.fullmatch(tree.text)
        if match is not None:
            name, index = match.group(1), int(match.group(2))
            if index not in declared.lines[name]:
                raise tree.refuse("a variable that is declared above")
            return [(name, index, factor)], 0.0
        return [], factor * _number(tree)
    if not tree or not isinstance(tree[0], Token) or len(tree) < 2:
        raise first([tree, near]).refuse("a number, a variable, (+ …), (- …) or (* …)")
    head, rest = tree[0], tree[1:]
    if head.text == "*":
        return _product(head, rest, declared, factor)
    if head.text not in ("+", "-"):
        raise head.refuse("+, - or *")
    signs = [1.0] * len(rest)
    if head.text == "-":
        signs = [-1.0] if len(rest) == 1 else [1.0, *[-1.0] * (len(rest) - 1)]
    parts = [_sum(part, declared, factor * sign, head) for part, sign in zip(rest, signs, strict=True)]
    return [term for terms, _ in parts for term in terms], sum(constant for _, constant in parts)


def _product(head: Token, rest: Sequence[Tree], declared: _Declared, factor: float) -> tuple[Terms, float]:
    variable: Tree | None = None
    for part in rest:
        terms, constant = _sum(part, declared, 1.0, head)
        if not terms:
            factor *= constant
        elif variable is not None:
            raise head.refuse("a product with at most one variable")
        else:
            variable = part
    return ([], factor) if variable is None else _sum(variable, declared, factor, head)


def _number(token: Token) -> float:
    value = float(token.text) if _NUMBER.fullmatch(token.text) else float("nan")
    if not isfinite(value):
        raise token.refuse("a number, X_i or Y_i")
    return value
