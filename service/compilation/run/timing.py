"""Measures step times of eager and compiled in turns, so that a change of the machine's pace affects both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median, quantiles

_MOST_ROUNDS = 9
_NOISY_SPREAD = 0.2
"""A race is noisy where the middle half of its ratios spans more than this part of their median."""


@dataclass(frozen=True)
class RaceSettings:
    """How long a race lasts: about ``budget_s`` seconds, in rounds of one block of each program, of ``block_s`` at
    least.
    """

    block_s: float = 0.02
    budget_s: float = 3.0
    fewest_rounds: int = 5


@dataclass(frozen=True)
class Race:
    """The result of a race."""

    step_s: float
    """The median seconds per step of compiled."""
    eager_step_s: float
    """The median seconds per step of eager."""
    ratio: float
    """Compiled over eager, the median over rounds."""
    noisy: bool
    """Whether the ratios are too far apart."""
    faster: bool
    """Whether compiled won in three quarters of the rounds."""


def plan_race(seconds: float, settings: RaceSettings) -> tuple[int, int]:
    """Return the calls per block and the rounds, for a call of ``seconds``."""
    repeats = max(1, math.ceil(settings.block_s / max(seconds, 1e-9)))
    rounds = int(settings.budget_s / (2 * repeats * max(seconds, 1e-9)))
    return repeats, min(max(rounds, settings.fewest_rounds), _MOST_ROUNDS)


def summarise(pairs: list[tuple[float, float]]) -> Race:
    """Return the race from per-round ``(eager, compiled)`` seconds per step; two rounds at least."""
    ratios = [compiled / eager for eager, compiled in pairs]
    lower, middle, upper = quantiles(ratios, n=4, method="inclusive")
    return Race(
        step_s=median(compiled for _, compiled in pairs),
        eager_step_s=median(eager for eager, _ in pairs),
        ratio=middle,
        noisy=(upper - lower) > _NOISY_SPREAD * middle,
        faster=upper < 1,
    )
