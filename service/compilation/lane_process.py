"""The process of a lane: it prepares the program, climbs its rungs, and tells of each."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar, cast

import torch

from service.compilation.ladder import Result, climb
from service.compilation.program import Program
from service.compilation.run.observation import RungCase
from service.compilation.run.run_rung import RunPlan, describe

SMALL = 1 << 28
"""Bytes of parameters and buffers up to which a program is held by several processes at once."""
STOP, SIZE = 0, 1
"""Places in the memory that all processes share: whether to stop, and how large the program is."""
UNKNOWN, IS_SMALL, IS_LARGE = 0, 1, 2
PREPARED, TAKES_ALL, BEGINS, CLIMBED, RAISED = "prepared", "takes all", "begins", "climbed", "raised"
"""What a process tells: what it has ready, that it climbs everything, a rung, its result, what it raised."""
_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of Linux's prctl."""
_POLL_S = 0.02

Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Prepared:
    """What a process has ready before its first rung; ``about`` is told to the one that started it."""

    program: Program
    plan: RunPlan
    about: Any


@dataclass(frozen=True)
class Climbed:
    """The result of a rung, and from when to when it ran, in Unix seconds; ``None`` where it did not run."""

    result: Result
    ran: tuple[float, float] | None = None


@dataclass(frozen=True)
class Lane:
    """What a process climbs, and how it tells. ``everything``, of the first process: what it climbs of a large
    program, which the others leave to it. ``races``: a file that a process locks while it measures.
    """

    prepare: Callable[[], Prepared]
    cases: Sequence[RungCase]
    everything: Sequence[RungCase]
    pipe: Connection
    shared: mmap.mmap
    races: int

    def be(self) -> NoReturn:
        """Climb, and end the process."""
        _die_with_parent()
        try:
            self._climb()
        except BaseException as error:
            self._tell(RAISED, _sendable(error))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)

    def _climb(self) -> None:
        prepared = self.prepare()
        self._tell(PREPARED, prepared.about)
        gc.freeze()  # what is imported by now holds no results, and there is much of it to be searched
        plan = replace(prepared.plan, alone=self._alone)
        for phase, cases in groupby(self._cases(prepared.program), lambda case: case.phase):
            began = time.time()
            rungs = [case.rung for case in cases]
            for result in climb(prepared.program, rungs, [phase], plan, self._is_to_stop, begins=self._begins):
                self._tell(CLIMBED, Climbed(_picklable(result), (began, time.time())))
                began = time.time()

    def _cases(self, program: Program) -> Sequence[RungCase]:
        """Return what is to be climbed here, once it is known how large the program is."""
        if self.shared[SIZE] == UNKNOWN and self.everything:
            self.shared[SIZE] = IS_LARGE if _bytes_of(program) > SMALL else IS_SMALL
            if self.shared[SIZE] == IS_LARGE:
                self._tell(TAKES_ALL, None)
                return self.everything
        while self.shared[SIZE] == UNKNOWN:
            time.sleep(_POLL_S)
        return self.cases if self.shared[SIZE] == IS_SMALL else ()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other process measure meanwhile."""
        fcntl.lockf(self.races, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.races, fcntl.LOCK_UN)

    def _is_to_stop(self) -> bool:
        return bool(self.shared[STOP])

    def _begins(self, case: RungCase) -> None:
        self._tell(BEGINS, case)

    def _tell(self, word: str, content: Any) -> None:
        self.pipe.send((word, content))


def beside(call: Callable[[], Returned]) -> Callable[[], Returned]:
    """Make a call in a fork of this process; what is returned waits for its result, and raises what it raised."""
    here, there = Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        _die_with_parent()
        try:
            there.send((call(), None))
        except BaseException as error:
            there.send((None, _sendable(error)))
        os._exit(0)
    there.close()

    def result() -> Returned:
        try:
            returned, error = here.recv()
        finally:
            here.close()
            os.waitpid(pid, 0)
        if error is not None:
            raise error
        return cast(Returned, returned)

    return result


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _bytes_of(program: Program) -> int:
    modules = program.build(torch.float32).modules.values()
    members = {id(each): each for module in modules for each in (*module.parameters(), *module.buffers())}
    return sum(each.nbytes for each in members.values())


def _picklable(result: Result) -> Result:
    """Return the result with the name of a backend in place of one that only this process has."""
    rehearsal = result.rehearsal
    if rehearsal is None:
        return result
    rung = replace(rehearsal.case.rung, backend="eager")
    return replace(result, rehearsal=replace(rehearsal, case=replace(rehearsal.case, rung=rung)))


def _sendable(error: BaseException) -> BaseException:
    """Return the error, or one that says the same where another process could not read it."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - this process's own
    except Exception:
        return RuntimeError(describe(error) if isinstance(error, Exception) else repr(error))
    return error
