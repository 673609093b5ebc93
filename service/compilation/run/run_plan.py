"""Plans the iterations of a rung's runs, and how long it may take."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from service.compilation.program import Program
from service.compilation.run.exchange import Exchange
from service.compilation.run.timing import RaceSettings
from service.compilation.rungs import Rung
from service.compilation.time_share import ENDLESS, TimeShare
from service.jobs.spec.compile import Tolerance

_BRIEF, _FEWEST_BRIEF = 6, 2
"""How much shorter a race that decides nothing is, and each of its blocks; and its fewest rounds."""


def _tell_nobody(name: str) -> None:
    """Take the name of a run that begins."""


@dataclass(frozen=True)
class RunPlan:
    """How long to observe a rung, and whom to ask and tell meanwhile."""

    iterations: int
    """The iterations that are judged."""
    warm_up: int
    """The iteration from which on nothing may be compiled."""
    steady: int
    """The iteration from which on no CUDA graph may be recorded."""
    tolerance: Tolerance
    agree: Callable[[float], float]
    """Makes one number for all ranks out of each rank's."""
    race: RaceSettings = field(default_factory=RaceSettings)
    alone: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered to measure a pace: other processes may wish to do so at the same time."""
    tells: Callable[[str], None] = _tell_nobody
    """Called with the name of each run that begins."""
    exchange: Exchange | None = None
    """Where other processes that climb the same phase leave its baseline, or take it; ``None`` if there are none."""
    defers: bool = False
    """Whether the first rung runs before the uncompiled runs that only judge it, while others make theirs."""
    share: TimeShare = ENDLESS
    fullgraph: bool = False
    """Whether a break of a graph is a failure."""
    limit_s: float = math.inf
    """The seconds after which a rung is given up, at the next of its iterations."""

    def race_of(self, rung: Rung) -> RaceSettings:
        """Return the length of the race: a rung that generates no code is no faster, and its pace decides nothing."""
        race = self.race
        brief = replace(
            race, block_s=race.block_s / _BRIEF, budget_s=race.budget_s / _BRIEF, fewest_rounds=_FEWEST_BRIEF
        )
        return self.race if rung.generates_code else brief


def plan_run(program: Program, steps: int, tolerance: Tolerance, agree: Callable[[float], float]) -> RunPlan:
    """Plan at least ``steps`` iterations, and enough to see every input shape again after warm-up.

    Warm-up is one pass over the shapes and two more iterations: one may make a dimension or a number dynamic, and a
    change that a first call leaves, such as a hook in an empty dictionary, may cause compilations in the next two. A
    CUDA graph is recorded at the second call that needs it, and its faults show from the second replay on.
    """
    period, warm_up = program.period, program.period + 2
    steady = 3 * period + 2
    enough = steady + period + 2 if program.device.type == "cuda" else 2 * period + 2
    return RunPlan(max(steps, enough), warm_up, steady, tolerance, agree)
