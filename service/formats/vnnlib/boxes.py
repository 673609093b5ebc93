"""Boxes of inputs, gathered constraint by constraint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from sys import float_info

from service.formats.vnnlib.query import Disjunct, Halfspace, VnnlibError
from service.formats.vnnlib.terms import LinearConstraint

LARGEST = Fraction(float_info.max)
"""The largest end of an interval."""


@dataclass(frozen=True)
class InputIntervals:
    """Exact ends of the inputs' intervals, as far as they are known; ``lines`` has each input's declaration."""

    lines: Mapping[int, int]
    lower: dict[int, Fraction] = field(default_factory=dict)
    upper: dict[int, Fraction] = field(default_factory=dict)

    def narrowed(self, constraint: LinearConstraint) -> bool:
        """Narrow an input's interval in place; return whether anything is left of it. Raises :class:`VnnlibError`."""
        if len(constraint.terms) > 1:
            expected = "inputs one at a time: only boxes of inputs are supported, for a comparison"
            raise constraint.token.refuse(expected)
        _, index, factor = constraint.terms[0]
        end = -constraint.constant / factor
        if abs(end) > LARGEST:
            raise constraint.token.refuse(f"a bound on X_{index} that is no larger than a float64 can be")
        if factor > 0:
            self.upper[index] = min(end, self.upper.get(index, end))
        else:
            self.lower[index] = max(end, self.lower.get(index, end))
        return index not in self.lower or index not in self.upper or self.lower[index] <= self.upper[index]

    @cached_property
    def box(self) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
        """Return the box, made once for all that have it. Raises :class:`VnnlibError` if an end is missing."""
        return self._all("lower", self.lower), self._all("upper", self.upper)

    def _all(self, side: str, known: Mapping[int, Fraction]) -> tuple[Fraction, ...]:
        for index, line in self.lines.items():
            if index not in known:
                raise VnnlibError(f"line {line}: X_{index} has no {side} bound, expected a box around every input")
        return tuple(known[index] for index in range(len(self.lines)))


@dataclass(frozen=True)
class Conditions:
    """The conditions of a disjunct so far; disjuncts with the same box share their ``ends``."""

    ends: InputIntervals
    halfspaces: tuple[Halfspace, ...] = ()
    empty: bool = False

    def adding(self, constraints: Sequence[LinearConstraint]) -> Conditions:
        """Return these conditions and some more. Raises :class:`VnnlibError` where an input is bounded by others."""
        halfspaces, on_inputs, empty = list(self.halfspaces), [], self.empty
        for constraint in constraints:
            names = {name for name, _, _ in constraint.terms}
            if not names:
                empty = empty or constraint.constant > 0
            elif names == {"Y"}:
                terms = tuple((index, factor) for _, index, factor in constraint.terms)
                halfspaces.append(Halfspace(terms, -constraint.constant))
            else:
                on_inputs.append(constraint)
        made = replace(self, halfspaces=tuple(halfspaces), empty=empty)
        return made._within(on_inputs) if on_inputs else made

    def _within(self, constraints: Sequence[LinearConstraint]) -> Conditions:
        ends = replace(self.ends, lower=dict(self.ends.lower), upper=dict(self.ends.upper))
        something = [ends.narrowed(constraint) for constraint in constraints]
        return replace(self, ends=ends, empty=self.empty or not all(something))

    def disjunct(self) -> Disjunct:
        """Return the disjunct of these conditions. Raises :class:`VnnlibError` where an end is missing."""
        return Disjunct(*self.ends.box, self.halfspaces)
