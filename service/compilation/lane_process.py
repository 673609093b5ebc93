"""Runs the process of a lane: prepares the program, climbs its rungs, and reports each."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from service.compilation.forks import IS_LARGE, IS_MEDIUM, IS_SMALL, SIZE, STOP, UNKNOWN, Seat
from service.compilation.ladder import Result, climb
from service.compilation.program import Program
from service.compilation.run.observation import RungCase
from service.compilation.run.run_rung import RunPlan
from service.jobs.runtime import Stopwatch

SMALL = 1 << 28
"""Bytes of parameters and buffers up to which several processes hold a program at once."""
_COPIES = 12
"""How many times its size a program may need at once, with gradients, states of before, and all of it in float64."""
PREPARED, TAKES, DOES, BEGINS, CLIMBED = "prepared", "takes", "does", "begins", "climbed"
"""The messages of a process: its preparations, the rungs that it climbs, the run that begins, that a rung begins, and
its result.
"""
_POLL_S = 0.02


@dataclass(frozen=True)
class Prepared:
    """A process's preparations for its first rung; ``about`` goes to the process that started it."""

    program: Program
    plan: RunPlan
    about: Any


@dataclass(frozen=True)
class Climbed:
    """The result of a rung, and its start and end in Unix seconds; ``None`` if it did not run. ``stacks``: those of
    its process, if it was given up.
    """

    result: Result
    ran: tuple[float, float] | None = None
    stacks: str = ""


@dataclass(frozen=True)
class Lane:
    """The rungs of a process. Of a program of medium size the first process of a phase climbs that whole,
    ``of_phase``, and of a large one the first of all climbs ``everything``; the others leave it to them.
    """

    cases: tuple[RungCase, ...]
    of_phase: tuple[RungCase, ...] = ()
    everything: tuple[RungCase, ...] = ()

    def climb(self, prepare: Callable[[], Prepared], seat: Seat) -> None:
        """Climb, and report."""
        prepared = prepare()
        seat.tell(PREPARED, prepared.about)
        plan = replace(prepared.plan, alone=lambda: _alone(seat.races), tells=lambda name: seat.tell(DOES, name))
        for phase, cases in groupby(self._cases(prepared.program, seat), lambda case: case.phase):
            watch = Stopwatch()
            rungs = [case.rung for case in cases]

            def is_to_stop() -> bool:
                return bool(seat.shared[STOP])

            def begins(case: RungCase) -> None:
                seat.tell(BEGINS, case)

            for result in climb(prepared.program, rungs, [phase], plan, is_to_stop, begins=begins):
                seat.tell(CLIMBED, Climbed(_picklable(result), (watch.began, watch.now)))
                watch = Stopwatch()

    def _cases(self, program: Program, seat: Seat) -> tuple[RungCase, ...]:
        """Return the cases to climb here, once the program's size is known."""
        if seat.shared[SIZE] == UNKNOWN and self.everything:
            seat.shared[SIZE] = _size_of(program)
        while seat.shared[SIZE] == UNKNOWN:
            time.sleep(_POLL_S)
        own = {IS_SMALL: self.cases, IS_MEDIUM: self.of_phase, IS_LARGE: self.everything}[seat.shared[SIZE]]
        seat.tell(TAKES, own)
        return own


def _size_of(program: Program) -> int:
    """Return whether a process for each lane, one for each phase, or only one may hold the program."""
    size = _bytes_of(program)
    if size <= SMALL:
        return IS_SMALL
    room = torch.cuda.mem_get_info(program.device)[0] if program.device.type == "cuda" else 0
    return IS_MEDIUM if 2 * _COPIES * size <= room else IS_LARGE


@contextlib.contextmanager
def _alone(races: int) -> Iterator[None]:
    """Keep other processes from measuring meanwhile."""
    fcntl.lockf(races, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(races, fcntl.LOCK_UN)


def _bytes_of(program: Program) -> int:
    modules = program.build(torch.float32).modules.values()
    members = {id(each): each for module in modules for each in (*module.parameters(), *module.buffers())}
    return sum(each.nbytes for each in members.values())


def _picklable(result: Result) -> Result:
    """Return the result with a backend that exists only in this process replaced by its name."""
    rehearsal = result.rehearsal
    if rehearsal is None:
        return result
    rung = replace(rehearsal.case.rung, backend="eager")
    return replace(result, rehearsal=replace(rehearsal, case=replace(rehearsal.case, rung=rung)))
