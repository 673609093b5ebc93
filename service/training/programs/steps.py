"""Runs the steps of a program, and says what is wrong with one."""

from __future__ import annotations

from typing import Any

from service.jobs.spec.compile import Phase
from service.models.program import Step, Steps
from service.models.randomness import drawn
from service.training.programs.failures import LackingError
from service.training.programs.setup import FIRST, PreparedProgram, takes


class ProgramSteps:
    """Runs the steps of one phase that follow ``done`` others; ``given`` are further arguments of the program's.

    Raises ``ProgramError`` for a step that raises, does not begin at the boundary, or has results of a shape that no
    step of the program's period had; :class:`LackingError` for one that draws before it begins, if the program is to go
    on from any step.

    A step is seeded where it begins. What comes before the first one, such as an order of samples, is seeded alike in
    every attempt.
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
        ready, phase = self._ready, self._phase
        self._begun += 1
        if self._begun == 1:
            ready.seed(f"{phase} begins", 0)
            ready.boundary.on_begin = lambda: ready.seed(phase, done)
            return
        ready.seed(phase, done)
        if self._begun == 2 and self._goes_on:  # the first may have drawn for all
            self._seeded = drawn(ready.device)
            ready.boundary.on_begin = self._check_draws

    def _check_draws(self) -> None:
        if drawn(self._ready.device) != self._seeded:
            raise LackingError(
                f"program {self._ready.config.name!r}, {self._phase}: it draws random numbers before "
                "boundary.step_boundary(), where a step begins, so what it draws would be other numbers after a "
                "resumption; expected the boundary first"
            )

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
