"""One step backward through an operator or a relaxation, by the representation of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.linear.rows.structured import StructuredRows

InitialRows = Tensor | IdentityRows
"""Rows that a traversal may begin with."""
Coefficients = Tensor | StructuredRows
"""Rows that may wait at a node in the middle of a traversal."""


@dataclass(frozen=True, eq=False)
class Propagated:
    """A step's coefficients for each input of a node, and its bias ``(batch or 1, rows)``."""

    coefficients: tuple[Coefficients, ...]
    bias: Tensor | None = None


Rule = TypeVar("Rule", bound=Callable[..., Propagated | None])


def backward_rule(representation: type[StructuredRows]) -> Callable[[Rule], Rule]:
    """Mark a method as the step for rows of ``representation``; ``None`` from it: they must be made dense."""

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
