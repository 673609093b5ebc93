"""Finds halfspaces that no outputs satisfy together, whatever the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from service.formats.vnnlib.query import Halfspace

MOST_INEQUALITIES = 256
"""The most inequalities at a time: beyond, no contradiction is looked for."""


@dataclass(frozen=True)
class _Inequality:
    """``Σ terms ≤ threshold``, ``<`` if it is ``strict``; no factor is 0."""

    terms: Mapping[int, Fraction]
    threshold: Fraction
    strict: bool

    @property
    def is_false(self) -> bool:
        return not self.terms and (self.threshold < 0 or (self.strict and self.threshold == 0))

    def plus(self, other: _Inequality, factor: Fraction) -> _Inequality:
        terms = dict(self.terms)
        for index, each in other.terms.items():
            terms[index] = terms.get(index, Fraction(0)) + factor * each
        kept = {index: each for index, each in terms.items() if each}
        return _Inequality(kept, self.threshold + factor * other.threshold, self.strict or other.strict)


def contradict(halfspaces: Sequence[Halfspace]) -> bool:
    """Return whether it is proved that no real outputs lie in all halfspaces: variables are eliminated one after the
    other, exactly (Fourier and Motzkin).
    """
    open_ = [
        _Inequality(
            {index: Fraction(factor) for index, factor in each.coefficients if factor},
            Fraction(each.threshold),
            each.strict,
        )
        for each in halfspaces
    ]
    while open_ and len(open_) <= MOST_INEQUALITIES:
        if any(each.is_false for each in open_):
            return True
        counts: dict[int, list[int]] = {}
        for each in open_:
            for index, factor in each.terms.items():
                counts.setdefault(index, [0, 0])[factor > 0] += 1
        if not counts:
            return False
        open_ = _without(open_, min(counts, key=lambda index: counts[index][0] * counts[index][1]))
    return False


def _without(inequalities: Sequence[_Inequality], index: int) -> list[_Inequality]:
    """Return inequalities of the others, which can be satisfied exactly if all can."""
    above = [each for each in inequalities if each.terms.get(index, 0) > 0]
    below = [each for each in inequalities if each.terms.get(index, 0) < 0]
    kept = [each for each in inequalities if index not in each.terms]
    if len(above) * len(below) + len(kept) > MOST_INEQUALITIES:
        return kept
    return kept + [high.plus(low, -high.terms[index] / low.terms[index]) for high in above for low in below]
