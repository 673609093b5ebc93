"""Climbing as in a job, without the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from launching import torchrun

from service.compilation.ladder import Result, climb
from service.compilation.observe import plan_for
from service.compilation.program import Phase, Program
from service.compilation.rungs import LADDER, Rung
from service.jobs.spec.compile import Tolerance

__all__ = ["Climb", "ascend", "torchrun"]

Climb = Callable[..., list[Result]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ascend() -> Climb:
    """``ascend(program, rungs, phases)``: the results; the rungs below code generation when none are given."""

    def run(
        program: Program, rungs: Sequence[Rung] = LADDER[:2], phases: Sequence[Phase] = ("train",), steps: int = 4
    ) -> list[Result]:
        return list(climb(program, rungs, phases, plan_for(program, steps, Tolerance(), lambda seconds: seconds)))

    return run
