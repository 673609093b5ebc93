"""Climbs a part of the ladder in a process of its own: prepares the program, climbs its rungs, and reports each."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from service.compilation.forks import IS_LARGE, IS_MEDIUM, IS_SMALL, SIZE, STOP, UNKNOWN, Seat
from service.compilation.judgement import Result
from service.compilation.ladder import climb
from service.compilation.prepare import Prepared
from service.compilation.program import Program
from service.compilation.run.observation import RungCase
from service.jobs.stopwatch import Stopwatch

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
class Climbed:
    """The result of a rung, and how it came about."""

    result: Result
    ran: tuple[float, float] | None = None
    """Its start and end in Unix seconds; ``None`` if it did not run."""
    stacks: str = ""
    """The stacks of its process, if it was given up."""


@dataclass(frozen=True)
class ClimbTask:
    """The rungs that one process climbs, which depend on the size of the program."""

    cases: tuple[RungCase, ...]
    """What it climbs of a small program, of which several processes may hold a copy."""
    of_phase: tuple[RungCase, ...] = ()
    """What it climbs of a medium one: the first process of a phase climbs the whole phase, the others nothing."""
    everything: tuple[RungCase, ...] = ()
    """What it climbs of a large one: the first process of all climbs everything."""

    def climb(self, prepare: Callable[[], Prepared], seat: Seat) -> None:
        """Climb, and report."""
        prepared = prepare()
        seat.tell(PREPARED, prepared.about)
        plan = replace(
            prepared.plan, alone=lambda: _measuring_alone(seat.races), tells=lambda name: seat.tell(DOES, name)
        )
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
    """Return whether a process for each part, one for each phase, or only one may hold the program."""
    size = _bytes_of(program)
    if size <= SMALL:
        return IS_SMALL
    room = torch.cuda.mem_get_info(program.device)[0] if program.device.type == "cuda" else 0
    return IS_MEDIUM if 2 * _COPIES * size <= room else IS_LARGE


@contextlib.contextmanager
def _measuring_alone(races: int) -> Iterator[None]:
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
