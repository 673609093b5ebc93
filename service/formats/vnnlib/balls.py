"""Defines balls of inputs in exact arithmetic, a class and a line for each norm. No VNN-LIB file can express them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar


@dataclass(frozen=True)
class ExactBall(ABC):
    """The inputs that differ from ``middle`` by at most ``size``, by a norm of this ``order``."""

    middle: tuple[float, ...]
    size: float
    order: ClassVar[int]

    def contains(self, inputs: Sequence[float]) -> bool:
        """Return whether the point lies in the ball, without any rounding."""
        return self._within([Fraction(x) - Fraction(at) for x, at in zip(inputs, self.middle, strict=True)])

    @abstractmethod
    def _within(self, changes: Sequence[Fraction]) -> bool:
        """Return whether the norm of the differences from the middle is small enough."""


class L2Ball(ExactBall):
    """The inputs at a Euclidean distance of at most ``size``."""

    order = 2

    def _within(self, changes: Sequence[Fraction]) -> bool:
        return sum((each**2 for each in changes), Fraction(0)) <= Fraction(self.size) ** 2


class L1Ball(ExactBall):
    """The inputs whose changes add up to at most ``size``."""

    order = 1

    def _within(self, changes: Sequence[Fraction]) -> bool:
        return sum(map(abs, changes), Fraction(0)) <= Fraction(self.size)


class L0Ball(ExactBall):
    """The inputs of which at most ``size`` entries change."""

    order = 0

    def _within(self, changes: Sequence[Fraction]) -> bool:
        return sum(each != 0 for each in changes) <= self.size


BALLS: Mapping[int, type[ExactBall]] = {each.order: each for each in (L0Ball, L1Ball, L2Ball)}
"""Balls by the order of their norm."""
