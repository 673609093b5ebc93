"""Defines the query of a VNN-LIB file as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isfinite

from service.formats.archive import UploadError
from service.formats.vnnlib.balls import ExactBall

Number = Fraction | float
"""An exact rational number: a float is the one that it stores."""


class VnnlibError(UploadError):
    """The text is not a property of the supported form; the message begins with the line and shows the token."""


@dataclass(frozen=True)
class Halfspace:
    """``Σ coefficients[j]·y[j] ≤ threshold``, over the reals; ``<`` if it is ``strict``. ``y`` may be inputs."""

    coefficients: tuple[tuple[int, Number], ...]
    threshold: Number
    strict: bool = False

    def contains(self, lower: Sequence[Number], upper: Sequence[Number]) -> bool:
        """Return whether all outputs between these ends lie in it, without rounding; infinite outputs do not."""
        most = Fraction(0)
        for index, factor in self.coefficients:
            if not all(isinstance(end, Fraction) or isfinite(end) for end in (lower[index], upper[index])):
                return False
            most += Fraction(factor) * Fraction(upper[index] if factor > 0 else lower[index])
        return most < self.threshold if self.strict else most <= self.threshold


@dataclass(frozen=True)
class Disjunct:
    """One disjunct of a query: a counterexample has its input in the box and its output in all of the halfspaces.

    Its input is also in all ``constraints``, halfspaces of inputs; the box encloses each of them tightly. The lower
    ends of the inputs ``open_lower`` are not in the box, nor are the upper ones of ``open_upper``.
    """

    lower: tuple[Number, ...]
    upper: tuple[Number, ...]
    halfspaces: tuple[Halfspace, ...]
    open_lower: frozenset[int] = frozenset()
    open_upper: frozenset[int] = frozenset()
    constraints: tuple[Halfspace, ...] = ()


@dataclass(frozen=True)
class Query:
    """A counterexample satisfies one of ``disjuncts``; the property holds if none of them can be satisfied.

    With ``ball``, which no VNN-LIB file can express, it also lies in that ball, which the disjuncts' boxes enclose.
    ``shapes`` are those of the input and of the output where a file of version 2 declares them.
    """

    inputs: int
    outputs: int
    disjuncts: tuple[Disjunct, ...]
    ball: ExactBall | None = None
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = field(default=None, compare=False)
