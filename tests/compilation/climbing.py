"""Climbing as in a job, without the service."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from service.compilation.ladder import Result, climb
from service.compilation.program import Phase, Program
from service.compilation.run.run_rung import plan_run
from service.compilation.rungs import LADDER, Rung
from service.jobs.spec.compile import Tolerance

Climb = Callable[..., list[Result]]
"""As :func:`ascend`."""


def ascend(
    program: Program, rungs: Sequence[Rung] = LADDER[:2], phases: Sequence[Phase] = ("train",), steps: int = 4
) -> list[Result]:
    """The results; of the rungs below code generation when none are given."""
    return list(climb(program, rungs, phases, plan_run(program, steps, Tolerance(), lambda seconds: seconds)))
