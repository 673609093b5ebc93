"""The backward traversal of a graph, which all linear bounds share.

Coefficients go from a node to the values that it is computed from, in reverse topological order, and wait there until
all consumers of a value have been met. What coefficients are, how they go through a node, how those of two consumers
are added and where they end is the caller's: rows of a pass (:mod:`~service.bounds.linear.row_traversal`), matrices
between non-linear operators (:mod:`service.bounds.folded`, :mod:`service.bounds.planes`), or sizes alone
(:mod:`~service.bounds.methods.base`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar


class Named(Protocol):
    """A node, or what stands for one."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)
P = TypeVar("P")


def traverse_backward(
    nodes: Iterable[N],
    pending: dict[str, P],
    propagate: Callable[[N, P], Iterable[tuple[str, P]]],
    join: Callable[[str, P, P], P],
) -> None:
    """Take what waits in ``pending``, by the name of a value, through ``nodes``, which are in reverse order.

    ``propagate`` returns what a node gives to each of the values that it is computed from, nothing where coefficients
    end. ``join`` is called with a value's name, what waits there and what comes; its result waits.
    """
    for node in nodes:
        if node.name in pending:
            # In a call of its own: what was only on the way is dropped before the next node.
            _pass_on(propagate(node, pending.pop(node.name)), pending, join)


def _pass_on(arriving: Iterable[tuple[str, P]], pending: dict[str, P], join: Callable[[str, P, P], P]) -> None:
    for name, new in arriving:
        pending[name] = join(name, pending[name], new) if name in pending else new
