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
    """Exact ends of the inputs' intervals, as far as they are known, and those of them that do not belong to it.

    ``lines`` has each input's declaration.
    """

    lines: Mapping[int, int]
    lower: dict[int, Fraction] = field(default_factory=dict)
    upper: dict[int, Fraction] = field(default_factory=dict)
    open_lower: set[int] = field(default_factory=set)
    open_upper: set[int] = field(default_factory=set)

    def narrowed(self, constraint: LinearConstraint) -> bool:
        """Narrow an input's interval in place; return whether anything is left of it. Raises :class:`VnnlibError`."""
        if len(constraint.terms) > 1:
            expected = "inputs one at a time: only boxes of inputs are supported, for a comparison"
            raise constraint.token.refuse(expected)
        _, index, factor = constraint.terms[0]
        end = -constraint.constant / factor
        if abs(end) > LARGEST:
            raise constraint.token.refuse(f"a bound on X_{index} that is no larger than a float64 can be")
        ends, opened = (self.upper, self.open_upper) if factor > 0 else (self.lower, self.open_lower)
        if index not in ends or (end < ends[index] if factor > 0 else end > ends[index]):
            ends[index] = end
            opened.discard(index)
        if constraint.strict and ends[index] == end:
            opened.add(index)
        return not self._is_empty(index)

    def _is_empty(self, index: int) -> bool:
        if index not in self.lower or index not in self.upper:
            return False
        low, high = self.lower[index], self.upper[index]
        return low >= high if index in self.open_lower or index in self.open_upper else low > high

    @cached_property
    def box(self) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
        """Return the box, made once for all that have it. Raises :class:`VnnlibError` if an end is missing."""
        return self._all("lower", self.lower), self._all("upper", self.upper)

    @cached_property
    def opened(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the inputs whose lower, and whose upper end is not in the box."""
        return frozenset(self.open_lower), frozenset(self.open_upper)

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
                empty = empty or constraint.constant > 0 or (constraint.strict and constraint.constant == 0)
            elif names == {"Y"}:
                terms = tuple((index, factor) for _, index, factor in constraint.terms)
                halfspaces.append(Halfspace(terms, -constraint.constant, constraint.strict))
            else:
                on_inputs.append(constraint)
        made = replace(self, halfspaces=tuple(halfspaces), empty=empty)
        return made._within(on_inputs) if on_inputs else made

    def _within(self, constraints: Sequence[LinearConstraint]) -> Conditions:
        known = self.ends
        ends = InputIntervals(
            known.lines, dict(known.lower), dict(known.upper), set(known.open_lower), set(known.open_upper)
        )
        something = [ends.narrowed(constraint) for constraint in constraints]
        return replace(self, ends=ends, empty=self.empty or not all(something))

    def disjunct(self) -> Disjunct:
        """Return the disjunct of these conditions. Raises :class:`VnnlibError` where an end is missing."""
        return Disjunct(*self.ends.box, self.halfspaces, *self.ends.opened)
