"""Climbs in processes of their own: rungs run side by side on enough cores, and no crash ends the job.

Every process prepares the program anew. The first of a phase makes its uncompiled runs for all, and hands them on as
plain data; the others begin once they have the first of these runs, and compile while the rest is made. The first
process of all learns the size of the program: a large one is climbed by one process, or by one for each phase. A rung
that runs out of memory beside others, or raises outside its run, is tried again without them.
"""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Protocol

from service.compilation import climber_process
from service.compilation.climber_process import Climbed, ClimbTask
from service.compilation.forks import FINEST, PLAN, STOP, UNKNOWN, ForkedProcess, Forks, innermost
from service.compilation.host_fault import HostFaultError
from service.compilation.judgement import Result
from service.compilation.ladder import GOES_ON
from service.compilation.plans import Plan
from service.compilation.run.observation import Observation, RungCase
from service.compilation.time_share import ENDLESS, TimeShare, given_up
from service.compilation.verdicts import Finding
from service.jobs.spec.compile import Phase
from service.linux import signal_name

_POLL_S = 0.1
_OUT_OF_MEMORY = "OutOfMemoryError"


class Watcher(Protocol):
    """Sees what the processes do."""

    def begin(self, process: int, cases: Sequence[RungCase]) -> None:
        """See a process begin with its cases."""

    def hear(self, process: int, doing: str) -> None:
        """See a process begin a run."""

    def end(self, process: int) -> None:
        """See the end of a process."""


def climb_apart(
    forks: Forks,
    plans: Sequence[Plan],
    should_stop: Callable[[], bool],
    told: Callable[[Any], None],
    *,
    watcher: Watcher,
    share: TimeShare = ENDLESS,
) -> Iterator[Climbed]:
    """Yield the results of all rungs in the order of the last of ``plans``, like
    :func:`service.compilation.ladder.climb`.

    Each of the ``forks`` gets its part of every plan; ``told`` is called with the preparations of each process,
    ``watcher`` with what it does. A process whose rung takes longer than its ``share`` is killed. Raises the error of
    a process that was the only one.
    """
    with _ClimbInProcesses(forks, plans, should_stop, told, watcher, share) as under_way:
        blocked: dict[Phase, str] = {}
        for case in under_way.everything:
            if case.phase in blocked:
                yield Climbed(Result(case, "not_reached", (Finding("not_reached", blocked[case.phase]),)))
                continue
            climbed = under_way.wait_for(case)
            if climbed.result.verdict not in GOES_ON:
                blocked[case.phase] = f"{case.rung.name} did not pass ({climbed.result.verdict})"
                under_way.forget(case.phase)
            yield climbed


@dataclass
class _Climber:
    """A process that climbs."""

    fork: ForkedProcess
    left: list[RungCase]
    """Its remaining cases."""
    alone: bool
    """Whether no other climbs beside it."""
    running: RungCase | None = None
    """Its current rung; ``None`` while the uncompiled program runs."""
    began: float = field(default_factory=time.monotonic)
    """When that, or the uncompiled program, has begun."""


@dataclass
class _ClimbInProcesses:
    """The processes of a climb, and the results that they have sent."""

    forks: Forks
    plans: Sequence[Plan]
    should_stop: Callable[[], bool]
    told: Callable[[Any], None]
    watcher: Watcher
    share: TimeShare
    processes: list[_Climber] = field(default_factory=list)
    again: list[RungCase] = field(default_factory=list)
    found: dict[RungCase, Climbed] = field(default_factory=dict)

    @property
    def everything(self) -> tuple[RungCase, ...]:
        return tuple(case for cases in self.plans[-1] for case in cases)

    def __enter__(self) -> _ClimbInProcesses:
        self.forks.shared[PLAN], self.forks.shared[STOP] = UNKNOWN, self.should_stop()
        finest = self.plans[0]
        for index in range(len(finest)):
            self._start(ClimbTask(tuple(self.plans), index), alone=len(finest) == 1)
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self.processes):
            self._kill(process)

    def wait_for(self, case: RungCase) -> Climbed:
        """Return the result of a rung, once it is known."""
        while case not in self.found:
            self.forks.shared[STOP] = self.should_stop()
            if not self.processes:
                rest = self._take_rest(case)
                self._start(ClimbTask(((rest,),)), alone=True)
            ready = wait([process.fork.told for process in self.processes], _POLL_S)
            for process in [process for process in self.processes if process.fork.told in ready]:
                self._hear(process)
            for process in [process for process in self.processes if self._is_late(process)]:
                self._give_up(process)
        return self.found[case]

    def forget(self, phase: Phase) -> None:
        """Skip the rest of a phase."""
        for process in list(self.processes):
            process.left = [case for case in process.left if case.phase != phase]
            if not process.left:
                self._kill(process)
        self.again = [case for case in self.again if case.phase != phase]

    def _take_rest(self, case: RungCase) -> tuple[RungCase, ...]:
        """Return the cases that one process climbs alone, in order."""
        rest = tuple(each for each in self.everything if each in self.again)
        if not rest:
            raise HostFaultError(f"the check of {case.rung.name} ended without a result")
        self.again = []
        return rest

    def _start(self, task: ClimbTask, *, alone: bool) -> None:
        try:
            fork = self.forks.take(task)
        except (IndexError, OSError) as error:
            raise HostFaultError("no process is left to climb the rest") from error
        most = task.plans[0][task.index]
        self.processes.append(_Climber(fork, list(most), alone))
        self.watcher.begin(fork.pid, most)

    def _hear(self, process: _Climber) -> None:
        try:
            word, content = process.fork.told.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self._report_crash(process)
            return
        if word == climber_process.PREPARED:
            self.told(content)
        elif word == climber_process.TAKES:
            process.left = list(content)
            process.alone = process.alone or len(content) == len(self.everything)
            self.watcher.begin(process.fork.pid, process.left)
        elif word == climber_process.DOES:
            self.watcher.hear(process.fork.pid, content)
        elif word == climber_process.BEGINS:
            process.running, process.began = content, time.monotonic()
        elif word == climber_process.CLIMBED:
            self._take_result(process, content)
        elif process.alone:
            raise content
        else:
            self._try_again(process)

    def _take_result(self, process: _Climber, climbed: Climbed) -> None:
        observation = climbed.result.observation
        if observation and _OUT_OF_MEMORY in observation.error and not process.alone:
            self._try_again(process)
            return
        self.found.setdefault(climbed.result.case, climbed)
        process.left = [case for case in process.left if case != climbed.result.case]
        process.running, process.began = None, time.monotonic()

    def _is_late(self, process: _Climber) -> bool:
        """Return whether a rung, or the uncompiled program before it, has taken longer than its share."""
        return bool(process.left) and time.monotonic() - process.began > self.share.seconds(len(process.left))

    def _give_up(self, process: _Climber) -> None:
        """End a rung that takes too long, with the stacks of its process, and let another one climb the rest."""
        case, *rest = process.left
        what = f"{case.phase}/{case.rung.name}" if process.running else f"the uncompiled program of {case.phase}"
        stacks = process.fork.stacks()
        finding = Finding("timeout", given_up(what, time.monotonic() - process.began, innermost(stacks)))
        self.found[case] = Climbed(Result(case, "timeout", (finding,)), stacks=stacks)
        self.again += rest
        self._kill(process)

    def _try_again(self, process: _Climber) -> None:
        """Climb the remaining rungs of a process once the others have ended."""
        self.again += process.left
        self._kill(process)

    def _report_crash(self, process: _Climber) -> None:
        """Report the rung at which a process crashed, and let another continue with the later phases."""
        self._let_go(process)
        code = process.fork.wait()
        if not process.left:
            return
        number = -code
        if number <= 0 or number in {signal.SIGKILL, signal.SIGTERM}:
            if process.alone:
                how = signal_name(number) if number > 0 else f"code {-number}"
                raise HostFaultError(f"a process of the check was ended from outside ({how})")
            self.again += process.left
            return
        case = process.left[0]
        what = "compiled" if process.running == case else "uncompiled"
        error = f"the {what} program crashes with {signal_name(number)} at {case.rung.name}"
        seen = Observation(case, error=error, crashed=True)
        self.found[case] = Climbed(Result(case, "fail_error", (Finding("fail_error", error),), seen))
        if others := [each for each in process.left if each.phase != case.phase]:
            self.again += others

    def _kill(self, process: _Climber) -> None:
        self._let_go(process)
        process.fork.end()

    def _let_go(self, process: _Climber) -> None:
        self.processes.remove(process)
        self.watcher.end(process.fork.pid)
        shared = self.forks.shared
        shared[PLAN] = shared[PLAN] or FINEST  # who was to choose it may be gone
