"""Climbs in processes of their own: rungs side by side where there are cores for them, and none whose crash ends the
job.

Every process prepares the program anew and runs the uncompiled one itself, so that they share nothing but the device.
The first of them sees how large the program is: a large one it climbs alone. What runs out of memory beside others, or
raises outside of a rung, is tried again without them.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from service.compilation import lane_process
from service.compilation.host_fault import HostFaultError
from service.compilation.ladder import Result
from service.compilation.lane_process import IS_LARGE, IS_SMALL, SIZE, STOP, UNKNOWN, Climbed, Lane, Prepared
from service.compilation.run.observation import Observation, RungCase
from service.compilation.rungs import Rung
from service.compilation.verdicts import Finding
from service.jobs.spec.compile import Phase

_POLL_S = 0.1
_OUT_OF_MEMORY = "OutOfMemoryError"
_MEMORY_DEVICE = "/dev/nvidia-uvm"
"""What CUDA opens when it starts, and what only counts devices does not."""


def can_fork() -> bool:
    """Return whether forks of this process may use a GPU: CUDA, which an import may start, cannot be started twice."""
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names alone, before one of them is gone
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}") == _MEMORY_DEVICE:  # noqa: PTH115 - a name, not a path to follow
                return False
    return True


def in_lanes(rungs: Sequence[Rung], phases: Sequence[Phase], cores: int) -> list[tuple[RungCase, ...]]:
    """Return what each process is to climb: all, a phase, or of each phase what generates code, one by one, and what
    does not; as many as there are two ``cores`` for each.
    """
    cases = [RungCase(rung, phase) for phase in phases for rung in rungs]
    finest = [tuple(group) for _, group in groupby(cases, lambda case: (case.phase, _own_lane(case.rung)))]
    by_phase = [tuple(group) for _, group in groupby(cases, lambda case: case.phase)]
    return next((lanes for lanes in (finest, by_phase) if 2 * len(lanes) <= cores), [tuple(cases)])


def _own_lane(rung: Rung) -> str:
    return rung.name if rung.generates_code else ""


def climb_apart(
    prepare: Callable[[], Prepared],
    lanes: Sequence[Sequence[RungCase]],
    should_stop: Callable[[], bool],
    told: Callable[[Any], None],
) -> Iterator[Climbed]:
    """Yield the results of all ``lanes`` in their order, as :func:`service.compilation.ladder.climb` does. Each lane is
    climbed by a fork of this process, which must not have started a device or computed anything. ``told`` hears once
    what was prepared.

    Raises what a process raised that was alone.
    """
    with _Climb(prepare, lanes, should_stop, told) as under_way:
        blocked: dict[Phase, str] = {}
        for case in under_way.everything:
            if case.phase in blocked:
                yield Climbed(Result(case, "not_reached", (Finding("not_reached", blocked[case.phase]),)))
                continue
            climbed = under_way.wait_for(case)
            if climbed.result.verdict not in {"pass", "not_applicable"}:
                blocked[case.phase] = f"{case.rung.name} did not pass ({climbed.result.verdict})"
                under_way.forget(case.phase)
            yield climbed


@dataclass
class _Process:
    """A process, what it has still to climb, and the rung that is under way. ``alone``: no other runs beside it."""

    pid: int
    pipe: Connection
    left: list[RungCase]
    alone: bool
    running: RungCase | None = None


@dataclass
class _Climb:
    prepare: Callable[[], Prepared]
    lanes: Sequence[Sequence[RungCase]]
    should_stop: Callable[[], bool]
    told: Callable[[Any], None]
    processes: list[_Process] = field(default_factory=list)
    again: list[list[RungCase]] = field(default_factory=list)
    found: dict[RungCase, Climbed] = field(default_factory=dict)
    shared: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 2))
    races: int = field(default_factory=lambda: os.memfd_create("trivet-races"))
    has_told: bool = False

    @property
    def everything(self) -> list[RungCase]:
        return [case for lane in self.lanes for case in lane]

    def __enter__(self) -> _Climb:
        alone = len(self.lanes) == 1
        self.shared[SIZE], self.shared[STOP] = IS_SMALL if alone else UNKNOWN, self.should_stop()
        for number, cases in enumerate(self.lanes):
            self._start(cases, alone=alone, decides=number == 0)
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self.processes):
            self._kill(process)
        os.close(self.races)
        self.shared.close()

    def wait_for(self, case: RungCase) -> Climbed:
        """Return what became of a rung, once it is known."""
        while case not in self.found:
            self.shared[STOP] = self.should_stop()
            if not self.processes:
                self._start(self._next_alone(case), alone=True)
            ready = wait([process.pipe for process in self.processes], _POLL_S)
            for process in [process for process in self.processes if process.pipe in ready]:
                self._hear(process)
        return self.found[case]

    def forget(self, phase: Phase) -> None:
        """Look no further into a phase."""
        for process in list(self.processes):
            process.left = [case for case in process.left if case.phase != phase]
            if not process.left:
                self._kill(process)
        kept = ([case for case in cases if case.phase != phase] for cases in self.again)
        self.again = [cases for cases in kept if cases]

    def _next_alone(self, case: RungCase) -> list[RungCase]:
        if not self.again:
            raise HostFaultError(f"the check of {case.rung.name} ended without a result")
        return self.again.pop(0)

    def _start(self, cases: Sequence[RungCase], *, alone: bool, decides: bool = False) -> None:
        here, there = Pipe(duplex=False)
        everything = self.everything if decides else []
        lane = Lane(self.prepare, tuple(cases), everything, there, self.shared, self.races)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            here.close()
            lane.be()
        there.close()
        self.processes.append(_Process(pid, here, list(cases), alone))

    def _hear(self, process: _Process) -> None:
        try:
            word, content = process.pipe.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self._ended(process)
            return
        if word == lane_process.PREPARED:
            if not self.has_told:
                self.told(content)
            self.has_told = True
        elif word == lane_process.TAKES_ALL:
            process.left, process.alone = self.everything, True
        elif word == lane_process.BEGINS:
            process.running = content
        elif word == lane_process.CLIMBED:
            self._climbed(process, content)
        elif process.alone:
            raise content
        else:
            self._try_again(process)

    def _climbed(self, process: _Process, climbed: Climbed) -> None:
        observation = climbed.result.observation
        if observation and _OUT_OF_MEMORY in observation.error and not process.alone:
            self._try_again(process)
            return
        self.found.setdefault(climbed.result.case, climbed)
        process.left = [case for case in process.left if case != climbed.result.case]

    def _try_again(self, process: _Process) -> None:
        """Let what is left for a process be climbed once the others have ended."""
        self.again.append(process.left)
        self._kill(process)

    def _ended(self, process: _Process) -> None:
        """Tell of the rung at which a process crashed, and let another go on with the phases after it."""
        code = self._reap(process)
        if not process.left or (self.shared[SIZE] == IS_LARGE and not process.alone):
            return
        number = -code
        if number <= 0 or number in {signal.SIGKILL, signal.SIGTERM}:
            if process.alone:
                raise HostFaultError(f"a process of the check was ended from outside ({_name(number)})")
            self.again.append(process.left)
            return
        case = process.left[0]
        what = "compiled" if process.running == case else "uncompiled"
        error = f"the {what} program crashes with {_name(number)} at {case.rung.name}"
        seen = Observation(case, error=error, crashed=True)
        self.found[case] = Climbed(Result(case, "fail_error", (Finding("fail_error", error),), seen))
        if others := [each for each in process.left if each.phase != case.phase]:
            self.again.append(others)

    def _kill(self, process: _Process) -> None:
        os.kill(process.pid, signal.SIGKILL)
        self._reap(process)

    def _reap(self, process: _Process) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        process.pipe.close()
        self.processes.remove(process)
        self.shared[SIZE] = self.shared[SIZE] or IS_SMALL  # the one that was to see it may be gone
        return code


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"code {-number}"
