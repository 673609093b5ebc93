"""Climbs a part of the ladder in a process of its own: prepares the program, climbs its rungs, and reports each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import torch

from service.compilation.forks import EXCHANGED, FINEST, HANDS_ON, PLAN, STOP, UNKNOWN, Seat
from service.compilation.instruments.profile import start_profiler
from service.compilation.judgement import Result
from service.compilation.ladder import climb
from service.compilation.plans import SMALL, Plan, choose_plan
from service.compilation.prepare import Prepared
from service.compilation.program import Program
from service.compilation.run.exchange import FileExchange, locked
from service.compilation.run_seconds import RunSeconds
from service.jobs.runtime import Stopwatch

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
    runs: Mapping[str, float] = field(default_factory=dict)
    """The seconds of each of its runs, with those of the uncompiled program before the first rung."""


@dataclass(frozen=True)
class ClimbTask:
    """The rungs that one process climbs, by the plan that the first chooses once the program's size is known."""

    plans: tuple[Plan, ...]
    index: int = 0
    """Its place in each plan; it has no rungs where a plan has fewer processes."""

    @property
    def generates_code(self) -> bool:
        """Return whether it does so by the plan with the most processes."""
        return any(case.rung.generates_code for case in self.plans[0][self.index])

    def climb(self, prepare: Callable[[], Prepared], seat: Seat) -> None:
        """Climb, and report."""
        runs = RunSeconds(lambda name: seat.tell(DOES, name))
        with runs.counted("preparing"):
            prepared = prepare()
        chosen = self._chosen_plan(prepared.program, seat)
        own = chosen[self.index] if self.index < len(chosen) else ()
        seat.tell(TAKES, own)
        with runs.counted("starting code generation"):
            seat.tell(PREPARED, (prepared.about, prepared.start([case.rung for case in own])))
        with runs.counted("starting the profiler"):
            start_profiler(prepared.program.device)
        alone = partial(locked, seat.races, 0, partial(runs.counted, "waiting to be timed"))
        plan = replace(prepared.plan, alone=alone, tells=runs.begin)
        exchange = FileExchange(seat.races, seat.exchanged, EXCHANGED, partial(runs.counted, "waiting for others"))
        for phase, cases in groupby(own, lambda case: case.phase):
            watch = Stopwatch()
            rungs = [case.rung for case in cases]
            # What one process makes for itself alone is not handed on.
            beside = [index for index, part in enumerate(chosen) if any(case.phase == phase for case in part)]
            shares = len(beside) > 1 or exchange.has_any(phase)
            own_plan = replace(
                plan,
                exchange=exchange if shares else None,
                defers=self.index > beside[0],
                each_makes_states=not seat.shared[HANDS_ON],
            )
            is_to_stop, begins = lambda: bool(seat.shared[STOP]), partial(seat.tell, BEGINS)
            for result in climb(prepared.program, rungs, [phase], own_plan, is_to_stop, begins=begins):
                seat.tell(CLIMBED, Climbed(_picklable(result), (watch.began, watch.now), runs=runs.take()))
                watch = Stopwatch()

    def _chosen_plan(self, program: Program, seat: Seat) -> Plan:
        """Return the plan, once the first process has chosen it."""
        if seat.shared[PLAN] == UNKNOWN and not self.index:
            size = _bytes_of(program)
            seat.shared[HANDS_ON] = size <= SMALL
            seat.shared[PLAN] = FINEST + choose_plan(self.plans, size, _room(program.device))
        while seat.shared[PLAN] == UNKNOWN:
            time.sleep(_POLL_S)
        return self.plans[min(seat.shared[PLAN] - FINEST, len(self.plans) - 1)]


def _room(device: torch.device) -> int:
    """Return the free bytes of the device's memory; 0 for a CPU's, which is not counted."""
    torch.cuda.empty_cache()  # measuring the program took some
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


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
