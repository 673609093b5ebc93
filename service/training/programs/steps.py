"""Runs the steps of a program, and says what is wrong with one."""

from __future__ import annotations

from functools import partial
from typing import Any

from service.jobs.spec.compile import Phase
from service.models.program import Step, Steps
from service.models.randomness import drawn
from service.training.programs.setup import FIRST, PreparedProgram, takes


class ProgramSteps:
    """Runs the steps of one phase that follow ``done`` others; ``given`` are further arguments of the program's.

    Raises ``ProgramError`` for a step that raises, does not begin at the boundary, or has results of a shape that no
    step of the program's period had.

    A step is seeded where it begins. What comes before the first one, such as an order of samples, is seeded alike in
    every attempt; draws between two steps are told, as the first step after a resumption has others.
    """

    def __init__(self, ready: PreparedProgram, phase: Phase, done: int, **given: Any) -> None:
        self._ready, self._phase = ready, phase
        self._period, self._left = ready.program.period, ready.program.period
        self._shapes: dict[str, set[tuple[int, ...]]] = {}
        run = ready.program.train if phase == "train" else ready.program.inference
        self._goes_on, self._begun, self._seeded = takes(run, FIRST), 0, ""
        known = {FIRST: done} if self._goes_on else {}
        ready.boundary.step = done - 1  # the number of a step that has not begun
        self._steps = Steps(run(ready.parts, ready.boundary, **known, **given), phase)

    def run(self, done: int) -> Step:
        """Run the step after ``done`` others."""
        ready, doing = self._ready, f"{self._phase} step {done + 1}"
        before = ready.boundary.step
        with ready.usage.step(done), ready.blame.of(doing), ready.calls.phase(self._phase):
            self._seed(done)
            step = next(self._steps)
        if ready.boundary.step == before:
            raise ready.blame.error(doing, "it does not begin with boundary.step_boundary()")
        self._check_shapes(step, doing)
        ready.blame.note_memory(done + 1)
        return step

    def _seed(self, done: int) -> None:
        ready, self._begun = self._ready, self._begun + 1
        if self._begun == 1:
            ready.seed(f"{self._phase} begins", 0)
        else:
            ready.seed(self._phase, done)
        self._seeded = drawn(ready.device) if self._begun == 2 and self._goes_on else ""
        ready.boundary.on_begin = partial(self._begin, done)

    def _begin(self, done: int) -> None:
        """Seed the step that begins. The first one of an attempt may have drawn for all, so the second one tells."""
        ready = self._ready
        if self._seeded and drawn(ready.device) != self._seeded:
            ready.context.report.log(
                f"program {ready.config.name!r}, {self._phase}: it, or a thread of it, draws random numbers before "
                "boundary.step_boundary(); those of the first step after a resumption are others"
            )
        ready.seed(self._phase, done)

    def _check_shapes(self, step: Step, doing: str) -> None:
        found = {f"output {name!r}": tuple(value.shape) for name, value in step.outputs.items()}
        found |= {f"loss {name!r}": () for name in step.losses}
        for name, shape in found.items():
            shapes = self._shapes.setdefault(name, set())
            if self._left <= 0 and shape not in shapes:
                seen = " or ".join(map(str, sorted(shapes))) or "no such result"
                had = f"and had {seen} in the steps before; all are seen within its period, which is {self._period}"
                raise self._ready.blame.error(doing, f"its {name} has shape {shape}, {had}")
            shapes.add(shape)
        self._left -= 1
