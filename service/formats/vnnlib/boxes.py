"""Gathers boxes of inputs, constraint by constraint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from sys import float_info

from service.formats.vnnlib.query import Disjunct, Halfspace, Number, VnnlibError
from service.formats.vnnlib.terms import LinearConstraint

LARGEST = Fraction(float_info.max)
"""The largest end of an interval."""
_BITS = 1000
"""Fewer bits than those of :data:`LARGEST`."""
ROUNDS, ZERO = 3, Fraction(0)
"""How often a box is tightened around its constraints."""


def _may_be_larger(end: Fraction) -> bool:
    """Return whether an end may be larger than :data:`LARGEST`; its bits tell of most that it is not."""
    return end.numerator.bit_length() > _BITS


@dataclass(frozen=True)
class InputIntervals:
    """The known exact ends of the inputs' intervals, and which of them do not belong to the interval.

    ``lines`` has each input's declaration.
    """

    lines: Mapping[int, int]
    lower: dict[int, Fraction] = field(default_factory=dict)
    upper: dict[int, Fraction] = field(default_factory=dict)
    open_lower: set[int] = field(default_factory=set)
    open_upper: set[int] = field(default_factory=set)

    def narrowed(self, constraint: LinearConstraint) -> bool:
        """Narrow an input's interval in place; return whether anything is left of it. Raises :class:`VnnlibError`."""
        _, index, factor = constraint.terms[0]
        end = constraint.threshold if factor == 1 else constraint.threshold / factor
        if _may_be_larger(end) and abs(end) > LARGEST:
            raise constraint.token.refuse(f"a bound on X_{index} that is no larger than a float64 can be")
        return self._within(index, factor, end, constraint.strict)

    def within(self, constraint: Halfspace) -> bool:
        """Narrow the intervals of the inputs of a constraint in place, each by the ends of the others; return whether
        anything is left of them.
        """
        for index, factor in constraint.coefficients:
            others = [self._least(each, part) for each, part in constraint.coefficients if each != index]
            if any(each is None for each in others):
                continue
            end = (Fraction(constraint.threshold) - sum(filter(None, others), ZERO)) / Fraction(factor)
            # An open end of another term would leave this end open, too; taking it as closed is sound.
            if abs(end) <= LARGEST and not self._within(index, Fraction(factor), end, strict=False):
                return False
        return True

    def _least(self, index: int, factor: Number) -> Fraction | None:
        """Return the least value of a term, if the input has that end."""
        end = (self.lower if factor > 0 else self.upper).get(index)
        return None if end is None else Fraction(factor) * end

    def _within(self, index: int, factor: Fraction, end: Fraction, strict: bool) -> bool:
        ends, opened = (self.upper, self.open_upper) if factor > 0 else (self.lower, self.open_lower)
        if index not in ends or (end < ends[index] if factor > 0 else end > ends[index]):
            ends[index] = end
            opened.discard(index)
        if strict and ends[index] == end:
            opened.add(index)
        return not self._is_empty(index)

    def _is_empty(self, index: int) -> bool:
        if index not in self.lower or index not in self.upper:
            return False
        low, high = self.lower[index], self.upper[index]
        return low >= high if index in self.open_lower or index in self.open_upper else low > high

    def copied(self) -> InputIntervals:
        """Return a copy of the intervals, to be narrowed."""
        return InputIntervals(
            self.lines, dict(self.lower), dict(self.upper), set(self.open_lower), set(self.open_upper)
        )

    @cached_property
    def box(self) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
        """Return the box, made once for all disjuncts that share it. Raises :class:`VnnlibError` if an end is
        missing.
        """
        return self._all("lower", self.lower), self._all("upper", self.upper)

    @cached_property
    def opened(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the inputs whose lower, and whose upper end is not in the box."""
        return frozenset(self.open_lower), frozenset(self.open_upper)

    def _all(self, side: str, known: Mapping[int, Fraction]) -> tuple[Fraction, ...]:
        if len(known) < len(self.lines):
            index = next(index for index in self.lines if index not in known)
            where = f"line {self.lines[index]}"
            raise VnnlibError(f"{where}: X_{index} has no {side} bound, expected a box around every input")
        return tuple(map(known.__getitem__, range(len(self.lines))))


@dataclass(frozen=True)
class Conditions:
    """The conditions of a disjunct so far; disjuncts with the same box share their ``ends``."""

    ends: InputIntervals
    halfspaces: tuple[Halfspace, ...] = ()
    empty: bool = False
    constraints: tuple[Halfspace, ...] = ()

    def adding(self, constraints: Sequence[LinearConstraint]) -> Conditions:
        """Return these conditions and some more. Raises :class:`VnnlibError` if inputs are compared with outputs."""
        halfspaces, on_inputs, empty = list(self.halfspaces), list[LinearConstraint](), self.empty
        among_inputs = list(self.constraints)
        for constraint in constraints:
            if len(constraint.terms) == 1 and constraint.terms[0][0] == "X":
                on_inputs.append(constraint)
                continue
            names = {name for name, _, _ in constraint.terms}
            if not names:
                empty = empty or constraint.threshold < 0 or (constraint.strict and constraint.threshold == 0)
            elif len(names) > 1:
                raise constraint.token.refuse("inputs and outputs in comparisons of their own")
            else:
                terms = tuple((index, factor) for _, index, factor in constraint.terms)
                found = Halfspace(terms, constraint.threshold, constraint.strict)
                (halfspaces if names == {"Y"} else among_inputs).append(found)
        made = Conditions(self.ends, tuple(halfspaces), empty, tuple(among_inputs))
        return made._within(on_inputs) if on_inputs else made

    def _within(self, constraints: Sequence[LinearConstraint]) -> Conditions:
        ends = self.ends.copied()
        something = [ends.narrowed(constraint) for constraint in constraints]
        return replace(self, ends=ends, empty=self.empty or not all(something))

    def disjunct(self) -> Disjunct | None:
        """Return the disjunct of these conditions, if anything is left of it. Raises :class:`VnnlibError` if an
        end is missing.
        """
        if not self.constraints:
            return None if self.empty else Disjunct(*self.ends.box, self.halfspaces, *self.ends.opened)
        ends = self.ends.copied()
        something = all(ends.within(each) for _ in range(ROUNDS) for each in self.constraints)
        if self.empty or not something:
            return None
        return Disjunct(*ends.box, self.halfspaces, *ends.opened, self.constraints)
