"""Tries, before ranks meet in a step, whether what each of them compiles by itself compiles at all.

A stage that raises while its neighbours wait for it would leave them waiting.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from service.compilation.host_fault import raise_host_fault
from service.compilation.program import Parts, Program
from service.compilation.ranks.collective_attempt import collective_attempt
from service.compilation.ranks.group import gather
from service.compilation.run.observation import RungCase
from service.compilation.run.program_run import build
from service.compilation.torch_internals.caches import empty_caches
from service.compilation.torch_internals.text import first_line
from service.jobs.spec.compile import Phase
from service.parallel.boundary import StepBoundary


@runtime_checkable
class Separable(Protocol):
    """A program whose ranks run different modules."""

    def alone(self, parts: Parts, boundary: StepBoundary, phase: Phase) -> None:
        """Run this rank's modules, and their backwards in training, without the other ranks; raises what they raise."""


def local_trial(program: Program, case: RungCase) -> str:
    """Return what went wrong on any rank when each ran its own modules compiled; empty where nothing did.

    Nothing is tried for a program that all ranks run alike: there a fault of the compiler is everybody's.
    """
    if not isinstance(program, Separable):
        return ""
    own = collective_attempt(lambda: _problem(program, program, case), str)
    problems = [f"rank {rank}: {problem}" for rank, problem in enumerate(gather(own)) if problem]
    return "; ".join(problems)


def _problem(program: Program, separable: Separable, case: RungCase) -> str:
    with empty_caches():
        try:
            program_run = build(program, case.phase, case.rung)
            separable.alone(program_run.parts, program_run.boundary, case.phase)
        except Exception as error:
            raise_host_fault(error)
            return f"{type(error).__name__}: {first_line(str(error))}"
    return ""
