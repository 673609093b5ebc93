"""Runs programs up the ladder as a job does, without the service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from service.compilation.judgement import Result
from service.compilation.ladder import climb
from service.compilation.program import Program
from service.compilation.run.run_plan import RunPlan, plan_run
from service.compilation.run.timing import RaceSettings
from service.compilation.rungs import LADDER, Rung
from service.jobs.spec.compile import Phase, Tolerance

Ascend = Callable[..., list[Result]]
"""The type of :func:`ascend`."""


def ascend(
    program: Program, rungs: Sequence[Rung] = LADDER[:2], phases: Sequence[Phase] = ("train",), steps: int = 4
) -> list[Result]:
    """Return the results of the rungs; by default of those below code generation."""
    return list(climb(program, rungs, phases, quick_plan(program, steps)))


def quick_plan(
    program: Program, steps: int, tolerance: Tolerance | None = None, agree: Callable[[float], float] = float
) -> RunPlan:
    """Return the plan of a job, but for the race: for tests that do not ask how long a step takes."""
    return replace(
        plan_run(program, steps, tolerance or Tolerance(), agree), race=RaceSettings(block_s=1e-3, budget_s=1e-3)
    )
