"""Step times of eager and compiled, taken in turns so that a change of the machine's pace meets both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

import torch

BLOCK_S = 0.02
RACE_S = 3.0
ROUNDS = (5, 9)
NOISY_SPREAD = 0.2


@dataclass(frozen=True)
class Race:
    """Median seconds per step of both; ``ratio`` is compiled over eager, the median over rounds.

    ``noisy``: the middle half of the ratios spans more than a fifth of their median. ``faster``: compiled won
    in three quarters of the rounds.
    """

    step_s: float
    eager_step_s: float
    ratio: float
    noisy: bool
    faster: bool


@dataclass(frozen=True)
class Runner:
    """A call that runs ``steps`` steps."""

    call: Callable[[], None]
    steps: int


def race(
    eager: Runner,
    compiled: Runner,
    device: torch.device,
    agree: Callable[[float], float] = lambda seconds: seconds,
) -> Race:
    """Time both in turns.

    ``agree`` makes one duration of all ranks' (they must run equally often, or their collectives do not match).
    """
    for runner in (eager, compiled):
        runner.call()
    slower = agree(max(_block(eager, 1, device), _block(compiled, 1, device)))
    repeats, rounds = plan_race(slower)
    pairs = [(_block(eager, repeats, device), _block(compiled, repeats, device)) for _ in range(rounds)]
    return summarise([(first / eager.steps, second / compiled.steps) for first, second in pairs])


def plan_race(seconds: float) -> tuple[int, int]:
    """Calls per block and rounds, for a call of ``seconds``: blocks long enough to time, within a fixed budget."""
    repeats = max(1, math.ceil(BLOCK_S / max(seconds, 1e-9)))
    rounds = int(RACE_S / (2 * repeats * max(seconds, 1e-9)))
    return repeats, min(max(rounds, ROUNDS[0]), ROUNDS[1])


def summarise(pairs: list[tuple[float, float]]) -> Race:
    """Return the race from per-round ``(eager, compiled)`` seconds per step; two rounds at least."""
    ratios = [compiled / eager for eager, compiled in pairs]
    lower, middle, upper = quantiles(ratios, n=4, method="inclusive")
    return Race(
        step_s=median(compiled for _, compiled in pairs),
        eager_step_s=median(eager for eager, _ in pairs),
        ratio=middle,
        noisy=(upper - lower) > NOISY_SPREAD * middle,
        faster=upper < 1,
    )


def _block(runner: Runner, repeats: int, device: torch.device) -> float:
    """Return the seconds per call."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        runner.call()
    _synchronize(device)
    return (time.perf_counter() - start) / repeats


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
