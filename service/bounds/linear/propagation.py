"""Traverses a graph backward, and takes rows back through one operator or relaxation by their representation.

Coefficients go from a node to its inputs, in reverse topological order, and wait there until all consumers of a
value have been visited. The caller defines coefficients, their step through a node, the sum of those of two
consumers, and where they end: rows of a pass (:mod:`~service.bounds.linear.row_traversal`), matrices
between non-linear operators (:mod:`service.bounds.folded`, :mod:`service.bounds.planes`), or sizes alone
(:mod:`service.bounds.methods.base`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from torch import Tensor

from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.linear.rows.structured import StructuredRows

InitialRows = Tensor | IdentityRows
"""Rows with which a traversal may begin."""
Coefficients = Tensor | StructuredRows
"""Rows that may wait at a node in the middle of a traversal."""


class Propagated(NamedTuple):
    """A step's coefficients for each input of a node, and its bias ``(batch or 1, rows)``."""

    coefficients: tuple[Coefficients, ...]
    bias: Tensor | None = None


Rule = TypeVar("Rule", bound=Callable[..., Propagated | None])


def backward_rule(representation: type[StructuredRows]) -> Callable[[Rule], Rule]:
    """Mark a method as the step for rows of ``representation``; if it returns ``None``, they must be made dense."""

    def mark(rule: Rule) -> Rule:
        rule.__dict__[MARK] = representation
        return rule

    return mark


MARK = "backward_rule"


class BackwardRules:
    """A class with methods that are marked by :func:`backward_rule`; a subclass inherits and replaces them."""

    backward_rules: ClassVar[Mapping[type[StructuredRows], Callable[..., Propagated | None]]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.backward_rules = {
            member.__dict__[MARK]: member
            for base in reversed(cls.__mro__)
            for member in vars(base).values()
            if MARK in getattr(member, "__dict__", {})
        }


class _Named(Protocol):
    """A node, or its stand-in."""

    @property
    def name(self) -> str:
        """Return the name of the value."""


N = TypeVar("N", bound=_Named)
P = TypeVar("P")


def traverse_backward(
    nodes: Iterable[N],
    pending: dict[str, P],
    propagate: Callable[[N, P], Iterable[tuple[str, P]]],
    join: Callable[[str, P, P], P],
) -> None:
    """Propagate the coefficients ``pending`` at values, by name, through ``nodes``, which are in reverse order.

    ``propagate`` returns a node's coefficients for each of its inputs, or nothing if they end. ``join`` adds
    new coefficients to those pending at a value, whose name comes first.
    """
    for node in nodes:
        if node.name in pending:
            # In a separate call, so that intermediate tensors are dropped before the next node.
            _pass_on(propagate(node, pending.pop(node.name)), pending, join)


def _pass_on(arriving: Iterable[tuple[str, P]], pending: dict[str, P], join: Callable[[str, P, P], P]) -> None:
    for name, new in arriving:
        pending[name] = join(name, pending[name], new) if name in pending else new
