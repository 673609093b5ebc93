"""Gathers boxes of inputs, constraint by constraint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from sys import float_info

from service.formats.vnnlib.query import Disjunct, Halfspace, Number, VnnlibError
from service.formats.vnnlib.terms import Constraint, InputBound

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

    ``lines`` has each input's declaration, ``shown`` its name.
    """

    lines: Mapping[int, int]
    shown: Callable[[int], str] = "X_{}".format
    lower: dict[int, Fraction] = field(default_factory=dict)
    upper: dict[int, Fraction] = field(default_factory=dict)
    open_lower: set[int] = field(default_factory=set)
    open_upper: set[int] = field(default_factory=set)

    def narrowed(self, bound: InputBound) -> bool:
        """Narrow an input's interval in place; return whether anything is left of it. Raises :class:`VnnlibError`."""
        index, is_upper, end, strict, origin = bound
        if _may_be_larger(end) and abs(end) > LARGEST:
            raise origin.refuse(f"a bound on {self.shown(index)} that is no larger than a float64 can be")
        return self._within(index, is_upper, end, strict)

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
            if abs(end) <= LARGEST and not self._within(index, factor > 0, end, strict=False):
                return False
        return True

    def _least(self, index: int, factor: Number) -> Fraction | None:
        """Return the least value of a term, if the input has that end."""
        end = (self.lower if factor > 0 else self.upper).get(index)
        return None if end is None else Fraction(factor) * end

    def _within(self, index: int, is_upper: bool, end: Fraction, strict: bool) -> bool:
        ends, opened = (self.upper, self.open_upper) if is_upper else (self.lower, self.open_lower)
        known = ends.get(index)
        if known is None or (end < known if is_upper else end > known):
            ends[index] = end
            opened.discard(index)
        if strict and ends[index] == end:
            opened.add(index)
        low, high = self.lower.get(index), self.upper.get(index)
        if low is None or high is None:
            return True
        return low < high or (low == high and index not in self.open_lower and index not in self.open_upper)

    def copied(self) -> InputIntervals:
        """Return a copy of the intervals, to be narrowed."""
        return InputIntervals(
            self.lines, self.shown, dict(self.lower), dict(self.upper), set(self.open_lower), set(self.open_upper)
        )

    @cached_property
    def box(self) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
        """Return the box, once for all disjuncts that share it. Raises :class:`VnnlibError` if an end is missing."""
        return self._all("lower", self.lower), self._all("upper", self.upper)

    @cached_property
    def opened(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the inputs whose lower, and whose upper end is not in the box."""
        return frozenset(self.open_lower), frozenset(self.open_upper)

    def _all(self, side: str, known: Mapping[int, Fraction]) -> tuple[Fraction, ...]:
        if len(known) < len(self.lines):
            index = next(index for index in self.lines if index not in known)
            where = f"line {self.lines[index]}"
            raise VnnlibError(f"{where}: {self.shown(index)} has no {side} bound, expected a box around every input")
        return tuple(map(known.__getitem__, range(len(self.lines))))


@dataclass(frozen=True)
class Conditions:
    """The conditions of a disjunct so far; disjuncts with the same box share their ``ends``."""

    ends: InputIntervals
    halfspaces: tuple[Halfspace, ...] = ()
    empty: bool = False
    constraints: tuple[Halfspace, ...] = ()

    def adding(self, constraints: Sequence[Constraint]) -> Conditions:
        """Return these conditions and some more. Raises :class:`VnnlibError` if inputs are compared with outputs."""
        halfspaces, on_inputs, empty = list(self.halfspaces), list[InputBound](), self.empty
        among_inputs = list(self.constraints)
        for constraint in constraints:
            if isinstance(constraint, Halfspace):
                halfspaces.append(constraint)
            elif isinstance(constraint, InputBound):
                on_inputs.append(constraint)
            elif not constraint.terms:
                empty = empty or constraint.threshold < 0 or (constraint.strict and constraint.threshold == 0)
            elif any(name == "Y" for name, _, _ in constraint.terms):
                raise constraint.origin.refuse("inputs and outputs in comparisons of their own")
            else:
                terms = tuple((index, factor) for _, index, factor in constraint.terms)
                among_inputs.append(Halfspace(terms, constraint.threshold, constraint.strict))
        made = Conditions(self.ends, tuple(halfspaces), empty, tuple(among_inputs))
        return made._within(on_inputs) if on_inputs else made

    def _within(self, bounds: Sequence[InputBound]) -> Conditions:
        ends = self.ends.copied()
        something = [ends.narrowed(bound) for bound in bounds]
        return replace(self, ends=ends, empty=self.empty or not all(something))

    def disjunct(self) -> Disjunct | None:
        """Return the disjunct of these conditions, if any is left. Raises :class:`VnnlibError` if an end is missing."""
        if not self.constraints:
            return None if self.empty else Disjunct(*self.ends.box, self.halfspaces, *self.ends.opened)
        ends = self.ends.copied()
        something = all(ends.within(each) for _ in range(ROUNDS) for each in self.constraints)
        if self.empty or not something:
            return None
        return Disjunct(*ends.box, self.halfspaces, *ends.opened, self.constraints)
