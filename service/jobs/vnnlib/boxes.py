"""Boxes of inputs, gathered constraint by constraint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import inf, nextafter

from service.jobs.vnnlib.query import Case, Halfspace, VnnlibError
from service.jobs.vnnlib.terms import Linear


@dataclass(frozen=True)
class Ends:
    """Ends of the inputs' intervals, as far as they are known; ``lines`` has each input's declaration."""

    lines: Mapping[int, int]
    lower: dict[int, float] = field(default_factory=dict)
    upper: dict[int, float] = field(default_factory=dict)

    def narrowed(self, constraint: Linear) -> None:
        if len(constraint.terms) > 1:
            expected = "inputs one at a time: only boxes of inputs are supported, for a comparison"
            raise constraint.token.refuse(expected)
        _, index, factor = constraint.terms[0]
        if factor > 0:
            self.upper[index] = min(_end(constraint, factor, inf), self.upper.get(index, inf))
        else:
            self.lower[index] = max(_end(constraint, factor, -inf), self.lower.get(index, -inf))

    @property
    def empty(self) -> bool:
        return any(low > self.upper.get(index, inf) for index, low in self.lower.items())

    @cached_property
    def box(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Made once for all cases that have it. Raises :class:`VnnlibError` where an end is missing."""
        return self._all("lower", self.lower), self._all("upper", self.upper)

    def _all(self, side: str, known: Mapping[int, float]) -> tuple[float, ...]:
        for index, line in self.lines.items():
            if index not in known:
                raise VnnlibError(f"line {line}: X_{index} has no {side} bound, expected a box around every input")
        return tuple(known[index] for index in range(len(self.lines)))


def _end(constraint: Linear, factor: float, outwards: float) -> float:
    """Where ``factor·x + constant`` is 0, rounded outwards."""
    exact = -Fraction(constraint.constant) / Fraction(factor)
    try:
        end = float(exact)
    except OverflowError:
        raise constraint.token.refuse("a bound on an input that is no larger than a number can be") from None
    beyond = Fraction(end) >= exact if outwards > 0 else Fraction(end) <= exact
    return end if beyond else nextafter(end, outwards)


@dataclass(frozen=True)
class Conditions:
    """A case in the making; cases with the same box share their ``ends``."""

    ends: Ends
    halfspaces: tuple[Halfspace, ...] = ()
    empty: bool = False

    def adding(self, constraints: Sequence[Linear]) -> Conditions:
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

    def _within(self, constraints: Sequence[Linear]) -> Conditions:
        ends = replace(self.ends, lower=dict(self.ends.lower), upper=dict(self.ends.upper))
        for constraint in constraints:
            ends.narrowed(constraint)
        return replace(self, ends=ends, empty=self.empty or ends.empty)

    def case(self) -> Case:
        return Case(*self.ends.box, self.halfspaces)
