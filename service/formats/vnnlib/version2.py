"""Reads VNN-LIB 2.0 (https://www.vnnlib.org): its statements, and the query about all networks side by side.

A comparison of inputs with outputs becomes one of outputs alone: those of a network that also gives its inputs.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial

from service.formats.vnnlib.boxes import InputIntervals
from service.formats.vnnlib.declared import (
    FLOATS,
    INTEGERS,
    REAL,
    Declarations,
    DeclaredNetwork,
    DeclaredTensor,
    Relation,
    Role,
    shape_of,
)
from service.formats.vnnlib.formulas import Conjunction, Expansion, combine, formula, only_formula
from service.formats.vnnlib.query import Halfspace, Query, VnnlibError
from service.formats.vnnlib.terms import Constraint, LinearConstraint, Token, Tree, first, trees

_VERSION = re.compile(r"(?:\s|;[^\r\n]*(?:[\r\n]|\Z))*\(\s*vnnlib-version\s")
_ROLES: dict[str, Role] = {"declare-input": "input", "declare-hidden": "hidden", "declare-output": "output"}
_ORDER = tuple(_ROLES.values())
_RELATIONS: dict[str, Relation] = {"equal-to": "equal-to", "isomorphic-to": "isomorphic-to"}
_NAME = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
SUPPORTED = "<2.0>"


@dataclass(frozen=True)
class DeclaredQuery:
    """A query about several networks: its inputs and outputs are theirs, side by side, hidden values before outputs.

    With ``compares_inputs``, all inputs follow as further outputs.
    """

    networks: tuple[DeclaredNetwork, ...]
    query: Query
    compares_inputs: bool

    @property
    def is_plain(self) -> bool:
        """Return whether it is about one network as it is, with one input and one output."""
        return len(self.networks) == 1 and len(self.networks[0].tensors) == 2 and not self.compares_inputs

    def why_not_plain(self) -> str:
        """Return the place and the name of what goes beyond one network as it is."""
        network, *others = self.networks
        if others:
            return f"line {others[0].line}: got a network {others[0].name!r} beside another"
        seen = set[str]()
        for each in network.tensors:
            if each.role == "hidden" or each.role in seen:
                return f"line {each.line}: got the {each.role} {each.name!r} beside others"
            seen.add(each.role)
        return "line 1: got a comparison of inputs with outputs"


def is_version_2(text: str) -> bool:
    """Return whether the file tells its version, as files of version 1 do not."""
    return _VERSION.match(text) is not None


def read_networks(text: str) -> DeclaredQuery:
    """Parse a file of VNN-LIB 2.0. Raises :class:`VnnlibError`, by line and column."""
    declared, expansion = Declarations(), Expansion()
    assertions: list[list[Conjunction]] = []
    for place, tree in enumerate(trees(text, declared)):
        head, rest = (tree[0] if tree else []), tree[1:]
        if not isinstance(head, Token):
            raise first(tree).refuse(declared.statements)
        if place == 0:
            _check_version(head, rest)
        elif head.text == "assert" and declared.networks:
            assertions.append(formula(only_formula(head, rest), declared, expansion, head))
        elif head.text == "declare-network" and not assertions:
            declared.add(_network(head, rest, declared))
        else:
            raise head.refuse("a network declared by (declare-network …), and after all of them (assert …)")
    return _joined(declared, assertions, expansion)


def _check_version(head: Token, rest: Sequence[Tree]) -> None:
    if head.text != "vnnlib-version" or len(rest) != 1:
        raise head.refuse(f"(vnnlib-version {SUPPORTED})")
    if not isinstance(rest[0], Token) or rest[0].text != SUPPORTED:
        raise first([rest[0], head]).refuse(f"{SUPPORTED}, the version that is supported beside 1")


def _joined(declared: Declarations, assertions: list[list[Conjunction]], expansion: Expansion) -> DeclaredQuery:
    if not declared.networks:
        raise VnnlibError("line 1: the file declares no network, expected at least one (declare-network …)")
    inputs, outputs = declared.lines["X"], len(declared.lines["Y"])
    compares = any(_is_mixed(each) for parts in assertions for part in parts for each in part)
    if compares:
        outputs_only = partial(_of_outputs, behind=outputs)
        assertions = [[tuple(map(outputs_only, part)) for part in parts] for parts in assertions]
    sizes = len(inputs), outputs + compares * len(inputs)
    query = combine(sizes, InputIntervals(inputs, inputs.shown), assertions, expansion)
    return DeclaredQuery(tuple(declared.networks.values()), query, compares)


def _is_mixed(constraint: Constraint) -> bool:
    return isinstance(constraint, LinearConstraint) and len({name for name, _, _ in constraint.terms}) == 2


def _of_outputs(constraint: Constraint, behind: int) -> Constraint:
    """Return a comparison of inputs with outputs as one of outputs, behind which the inputs follow."""
    if not isinstance(constraint, LinearConstraint) or not _is_mixed(constraint):
        return constraint
    terms = tuple((place + behind * (name == "X"), factor) for name, place, factor in constraint.terms)
    return Halfspace(terms, constraint.threshold, constraint.strict)


def _network(head: Token, rest: Sequence[Tree], declared: Declarations) -> DeclaredNetwork:
    name = _new_name(rest[0] if rest else head, "network", declared.networks)
    relation, other, parts = None, "", list(rest[1:])
    if parts and isinstance(parts[0], list) and parts[0] and isinstance(parts[0][0], Token):
        relation = _RELATIONS.get(parts[0][0].text)
    if relation is not None:
        other = _other(parts.pop(0), declared)
    tensors, last = dict[str, DeclaredTensor](), _ORDER[0]
    for part in parts:
        tensor = _tensor(part, head, {**declared.tensors, **tensors})
        if _ORDER.index(tensor.role) < _ORDER.index(last):
            raise first([part]).refuse("inputs, hidden values and outputs in this order")
        last = tensor.role
        tensors[tensor.name] = tensor
    network = DeclaredNetwork(name, tuple(tensors.values()), head.line, relation, other)
    if not network.having("input") or not network.having("output"):
        raise head.refuse(f"one (declare-input …) and one (declare-output …) at least in {name}")
    if relation is not None:
        _check_relation(network, declared.networks[other], head)
    return network


def _new_name(tree: Tree, what: str, known: Container[str]) -> str:
    token = first([tree])
    if not isinstance(tree, Token) or not _NAME.fullmatch(token.text):
        raise token.refuse(f"the name of a {what}")
    if token.text in known:
        raise token.refuse(f"a {what} of a name that is not declared above")
    return token.text


def _other(tree: Tree, declared: Declarations) -> str:
    """Parse the network that another one is equal or isomorphic to; it must be neither itself."""
    assert isinstance(tree, list)
    named = tree[1] if len(tree) == 2 else tree[0]
    if not isinstance(named, Token) or named.text not in declared.networks:
        raise first(tree if named is tree[0] else [named]).refuse("the name of a network that is declared above")
    if declared.networks[named.text].relation is not None:
        raise named.refuse("a network that is not declared by another one itself")
    return named.text


def _check_relation(network: DeclaredNetwork, other: DeclaredNetwork, head: Token) -> None:
    def interface(each: DeclaredNetwork) -> list[tuple[str, ...]]:
        kinds = network.relation == "equal-to"
        return [
            (tensor.role, str(tensor.shape), tensor.kind.lower() if kinds else "")
            for tensor in each.having("input", "output")
        ]

    if interface(network) != interface(other):
        same = "shapes and types" if network.relation == "equal-to" else "shapes"
        raise head.refuse(f"inputs and outputs of {network.name} in the {same} of {other.name}")


def _tensor(tree: Tree, near: Token, known: Container[str]) -> DeclaredTensor:
    head = tree[0] if isinstance(tree, list) and tree else tree
    if not isinstance(tree, list) or not isinstance(head, Token) or head.text not in _ROLES:
        raise first([tree, near]).refuse("(declare-input …), (declare-hidden …) or (declare-output …)")
    role, rest = _ROLES[head.text], tree[1:]
    name = _new_name(rest[0] if rest else head, "tensor", known)
    kind, shape, more = _typed(rest[1:], head)
    if role == "input" and kind.lower() not in FLOATS | {REAL}:
        raise head.refuse(f"an input of {REAL} or floating-point numbers: one of {kind} is not supported")
    value = ""
    if role == "hidden" and more and isinstance(more[0], Token) and more[0].text[0] == '"':
        value, more = more[0].text[1:-1], more[1:]
    if role == "hidden" and not value:
        raise head.refuse(f'the "name" of {name} in the ONNX file after its shape')
    if more:
        raise first([more[0], head]).refuse("')': options of a tensor are not supported")
    return DeclaredTensor(name, role, kind, shape, head.line, value)


def _typed(rest: Sequence[Tree], head: Token) -> tuple[str, tuple[int, ...], Sequence[Tree]]:
    """Parse ``float32 [1,5]``, which is one token or two; return what follows, too."""
    token = rest[0] if rest else head
    kind, bracket, places = token.text.partition("[") if isinstance(token, Token) else ("", "", "")
    kind, more = kind.strip(), rest[1:]
    if not isinstance(token, Token) or kind.lower() not in FLOATS | INTEGERS | {REAL}:
        raise first([token, head]).refuse(f"{REAL}, {', '.join(sorted(FLOATS))} or a type of integers")
    if not bracket and more and isinstance(more[0], Token):
        token, more = more[0], more[1:]
        return kind, shape_of(token, token.text), more
    return kind, shape_of(token, f"{bracket}{places}"), more
