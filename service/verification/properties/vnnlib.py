"""VNN-LIB 1: what a counterexample must satisfy, as boxes of inputs and halfspaces of outputs.

The file declares reals ``X_i`` and ``Y_j`` and asserts ``<=`` and ``>=`` between sums of them and numbers, under
``and`` and ``or``. All assertions together hold for a counterexample; the property holds if there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf

_TOKEN = re.compile(r"[()]|[^\s();]+|;[^\n]*|\n")
_VARIABLE = re.compile(r"([XY])_(\d+)$")
MOST_CASES = 100_000


class VnnlibError(ValueError):
    """The text is not a property of the supported form; the message begins with the line and shows the token."""


@dataclass(frozen=True)
class Token:
    text: str
    line: int

    def refuse(self, expected: str) -> VnnlibError:
        return VnnlibError(f"line {self.line}: got {self.text!r}, expected {expected}")


@dataclass(frozen=True)
class Halfspace:
    """``Σ coefficients[j]·y[j] ≤ threshold``."""

    coefficients: tuple[tuple[int, float], ...]
    threshold: float


@dataclass(frozen=True)
class Case:
    """One disjunct: a counterexample has its input in the box and its output in all of the halfspaces."""

    lower: tuple[float, ...]
    upper: tuple[float, ...]
    halfspaces: tuple[Halfspace, ...]


@dataclass(frozen=True)
class Query:
    """A counterexample satisfies one of ``cases``; the property holds if none of them can be satisfied."""

    inputs: int
    outputs: int
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class _Linear:
    """``Σ terms + constant ≤ 0``; ``token`` is where it came from."""

    terms: tuple[tuple[str, int, float], ...]
    constant: float
    token: Token


Tree = Token | list["Tree"]
Conjunction = tuple[_Linear, ...]


def parse(text: str) -> Query:
    """The query of a file's text. Raises :class:`VnnlibError`."""
    declared: dict[str, set[int]] = {"X": set(), "Y": set()}
    assertions: list[list[Conjunction]] = []
    for tree in _trees(text):
        _statement(tree, declared, assertions)
    inputs, outputs = (_count(name, declared[name]) for name in ("X", "Y"))
    if not assertions:
        raise VnnlibError("line 1: the file asserts nothing, expected at least one (assert …)")
    alternatives = [each for each in assertions if len(each) > 1]
    common = [linear for each in assertions if len(each) == 1 for linear in each[0]]
    cases = 1
    for each in alternatives:
        cases *= len(each)
    if cases > MOST_CASES:
        raise VnnlibError(f"line 1: the disjunctions multiply to {cases} cases, at most {MOST_CASES} are supported")
    shared = _Bounds(inputs).adding(common)
    chosen = (shared.adding([linear for part in parts for linear in part]) for parts in product(*alternatives))
    found = [each.case() for each in chosen if not each.empty]
    return Query(inputs, outputs, tuple(found))


def _trees(text: str) -> Iterator[list[Tree]]:
    """Top-level expressions, one at a time: files of thousands of lines never become one tree."""
    stack: list[list[Tree]] = []
    opened: list[Token] = []
    line = 1
    for match in _TOKEN.finditer(text):
        token = Token(match.group(), line)
        if token.text == "\n":
            line += 1
        elif token.text == "(":
            stack.append([])
            opened.append(token)
        elif token.text == ")":
            if not stack:
                raise token.refuse("no closing bracket here")
            done = stack.pop()
            opened.pop()
            if stack:
                stack[-1].append(done)
            else:
                yield done
        elif not token.text.startswith(";"):
            if not stack:
                raise token.refuse("'('")
            stack[-1].append(token)
    if opened:
        raise VnnlibError(f"line {opened[-1].line}: got '(' that nothing closes, expected ')'")


def _statement(tree: list[Tree], declared: dict[str, set[int]], assertions: list[list[Conjunction]]) -> None:
    head, rest = (tree[0] if tree else []), tree[1:]
    if not isinstance(head, Token):
        raise _first(tree).refuse("declare-const or assert")
    if head.text == "assert":
        if len(rest) != 1:
            raise head.refuse(f"one formula, not {len(rest)},")
        assertions.append(_formula(rest[0], declared))
    elif head.text in ("declare-const", "declare-fun"):
        name = rest[0] if rest else head
        match = _VARIABLE.match(name.text) if isinstance(name, Token) else None
        kind = rest[-1]
        if match is None or not isinstance(kind, Token):
            raise _first([name]).refuse("a name X_i or Y_i")
        if kind.text != "Real":
            raise kind.refuse("Real")
        declared[match.group(1)].add(int(match.group(2)))
    else:
        raise head.refuse("declare-const or assert")


def _formula(tree: Tree, declared: dict[str, set[int]]) -> list[Conjunction]:
    """In disjunctive normal form."""
    if isinstance(tree, Token) or not tree or not isinstance(tree[0], Token):
        raise _first([tree]).refuse("(and …), (or …), (<= …) or (>= …)")
    head, rest = tree[0], tree[1:]
    if head.text == "or":
        return [conjunction for part in rest for conjunction in _formula(part, declared)]
    if head.text == "and":
        parts = [_formula(part, declared) for part in rest]
        return [tuple(linear for each in chosen for linear in each) for chosen in product(*parts)]
    if head.text in ("<=", ">="):
        if len(rest) != 2:
            raise head.refuse(f"two sides, not {len(rest)}, for the comparison")
        low, high = (rest[0], rest[1]) if head.text == "<=" else (rest[1], rest[0])
        terms, constant = _sum(low, declared, 1.0)
        others, offset = _sum(high, declared, -1.0)
        return [(_Linear(_collected([*terms, *others]), constant + offset, head),)]
    raise head.refuse("and, or, <= or >=")


Terms = list[tuple[str, int, float]]


def _sum(tree: Tree, declared: dict[str, set[int]], factor: float) -> tuple[Terms, float]:
    """An expression as terms and a constant, times ``factor``."""
    if isinstance(tree, Token):
        match = _VARIABLE.match(tree.text)
        if match is not None:
            name, index = match.group(1), int(match.group(2))
            if index not in declared[name]:
                raise tree.refuse("a variable that is declared above")
            return [(name, index, factor)], 0.0
        return [], factor * _number(tree)
    if not tree or not isinstance(tree[0], Token) or len(tree) < 2:
        raise _first(tree).refuse("a number, a variable, (+ …), (- …) or (* …)")
    head, rest = tree[0], tree[1:]
    if head.text == "*":
        return _product(head, rest, declared, factor)
    if head.text not in ("+", "-"):
        raise head.refuse("+, - or *")
    signs = [1.0] * len(rest)
    if head.text == "-":
        signs = [-1.0] if len(rest) == 1 else [1.0, *[-1.0] * (len(rest) - 1)]
    parts = [_sum(part, declared, factor * sign) for part, sign in zip(rest, signs, strict=True)]
    return [term for terms, _ in parts for term in terms], sum(constant for _, constant in parts)


def _product(head: Token, rest: Sequence[Tree], declared: dict[str, set[int]], factor: float) -> tuple[Terms, float]:
    variable: Tree | None = None
    for part in rest:
        terms, constant = _sum(part, declared, 1.0)
        if not terms:
            factor *= constant
        elif variable is not None:
            raise head.refuse("a product with at most one variable")
        else:
            variable = part
    return ([], factor) if variable is None else _sum(variable, declared, factor)


def _number(token: Token) -> float:
    try:
        return float(token.text)
    except ValueError:
        raise token.refuse("a number, X_i or Y_i") from None


def _collected(terms: Terms) -> tuple[tuple[str, int, float], ...]:
    total: dict[tuple[str, int], float] = {}
    for name, index, factor in terms:
        total[name, index] = total.get((name, index), 0.0) + factor
    return tuple((name, index, factor) for (name, index), factor in total.items() if factor)


def _first(tree: Sequence[Tree | None]) -> Token:
    """The first token within, for a message."""
    for part in tree:
        if isinstance(part, Token):
            return part
        if part:
            return _first(part)
    return Token("()", 0)


def _count(name: str, indices: set[int]) -> int:
    if indices != set(range(len(indices))) or not indices:
        missing = min(set(range(max(indices, default=0) + 1)) - indices, default=0)
        raise VnnlibError(f"line 1: {name}_{missing} is not declared, expected {name}_0, {name}_1, … without gaps")
    return len(indices)


@dataclass
class _Bounds:
    """A case in the making."""

    inputs: int
    lower: dict[int, float] = field(default_factory=dict)
    upper: dict[int, float] = field(default_factory=dict)
    halfspaces: tuple[Halfspace, ...] = ()
    empty: bool = False

    def adding(self, constraints: Sequence[_Linear]) -> _Bounds:
        made = _Bounds(self.inputs, dict(self.lower), dict(self.upper), self.halfspaces, self.empty)
        for constraint in constraints:
            made._add(constraint)
        return made

    def _add(self, constraint: _Linear) -> None:
        names = {name for name, _, _ in constraint.terms}
        if not names:
            self.empty = self.empty or constraint.constant > 0
        elif names == {"Y"}:
            terms = tuple((index, factor) for _, index, factor in constraint.terms)
            self.halfspaces = (*self.halfspaces, Halfspace(terms, -constraint.constant))
        elif len(constraint.terms) > 1:
            raise constraint.token.refuse("inputs one at a time: only boxes of inputs are supported, for a comparison")
        else:
            _, index, factor = constraint.terms[0]
            end = -constraint.constant / factor
            if factor > 0:
                self.upper[index] = min(end, self.upper.get(index, inf))
            else:
                self.lower[index] = max(end, self.lower.get(index, -inf))
            low, high = self.lower.get(index, -inf), self.upper.get(index, inf)
            self.empty = self.empty or low > high

    def case(self) -> Case:
        for index in range(self.inputs):
            if index not in self.lower or index not in self.upper:
                side = "lower" if index not in self.lower else "upper"
                raise VnnlibError(f"line 1: X_{index} has no {side} bound, expected a box around every input")
        ordered = range(self.inputs)
        return Case(
            tuple(self.lower[index] for index in ordered),
            tuple(self.upper[index] for index in ordered),
            self.halfspaces,
        )
