"""Forks processes for later work, before any import that might start a device."""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from service.jobs.spec.compile import Phase
from service.linux import die_with_parent, leave, open_files

PROCESSES: tuple[Mapping[Phase, int], ...] = (
    {"train": 3, "inference": 3},
    {"train": 3, "inference": 1},
    {"train": 2, "inference": 1},
    {"train": 1, "inference": 1},
)
"""Processes that climb each phase, the most first: each more starts, and shares the device (8 layers of 512, one
H200).
"""
CORES = 2
"""The cores of each process."""
STOP, PLAN, HANDS_ON = 0, 1, 2
"""Places in the memory that all processes share: whether to stop, the number of the plan by which they climb, and
whether the states of uncompiled runs are small enough to be handed on.
"""
UNKNOWN, FINEST = 0, 1
"""No plan has been chosen yet; the first, with the most processes."""
EXCHANGED = ("train: first run", "train: baseline", "inference: first run", "inference: baseline")
"""What the processes of a phase make once for all of them."""
RAISED = "raised"
"""The message with which a process sends the exception that ended it."""
_STACKS_S, _MOST_STACKS = 1.0, 1 << 16
"""How long a process may take to write its stacks, and how many bytes of them are read."""
_FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')
_MEMORY_DEVICE = "/dev/nvidia-uvm"
"""CUDA opens this when it starts; counting devices does not."""


@dataclass(frozen=True)
class Seat:
    """A forked process's ends of the lines to its parent."""

    tasks: Connection
    """Where tasks arrive."""
    told: Connection
    """Where results go."""
    shared: mmap.mmap
    races: int
    """A file of which a process locks a byte: the first while it measures, others while it makes what all need."""
    exchanged: tuple[int, ...]
    """Files for that."""
    eager: bool
    """Whether a task is sure to come."""

    def tell(self, word: str, content: Any) -> None:
        self.told.send((word, content))


@dataclass(frozen=True)
class ForkedProcess:
    """A process that has been forked, with the other ends of its pipes."""

    pid: int
    tasks: Connection
    told: Connection
    dumped: int

    def stacks(self) -> str:
        """Return the Python stacks of all its threads, innermost calls first; what there is of them within a second."""
        os.kill(self.pid, signal.SIGUSR1)
        text, ends = b"", time.monotonic() + _STACKS_S
        while time.monotonic() < ends:
            time.sleep(_STACKS_S / 10)
            before, text = text, os.pread(self.dumped, _MOST_STACKS, 0)
            if text and text == before:
                break
        return text.decode(errors="replace")

    def end(self) -> int:
        """Kill it, if it has not ended; return its exit code, negative for a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """Return its exit code once it has ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.tasks.close()
        self.told.close()
        os.close(self.dumped)
        return code


@dataclass(frozen=True)
class Forks:
    """Processes that wait for a task; those already told to prepare for one come first."""

    shared: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 3))
    races: int = field(default_factory=lambda: os.memfd_create("trivet-races"))
    exchanged: tuple[int, ...] = field(default_factory=lambda: tuple(map(os.memfd_create, EXCHANGED)))
    idle: list[ForkedProcess] = field(default_factory=list)

    @staticmethod
    def ready(serve: Callable[[Seat], None], eager: int, spare: int) -> Forks:
        """Fork so many processes; in each of them ``serve`` gets its seat and then takes a task."""
        forks = Forks()
        for number in range(eager + spare):
            forks.idle.append(forks._fork(serve, eager=number < eager))
        return forks

    def take(self, task: Any) -> ForkedProcess:
        """Give a waiting process a task. Raises ``IndexError`` if none is left."""
        fork = self.idle.pop(0)
        fork.tasks.send(task)
        return fork

    def end(self) -> None:
        """End the processes that still wait."""
        while self.idle:
            self.idle.pop().end()
        for file in (self.races, *self.exchanged):
            os.close(file)

    def _fork(self, serve: Callable[[Seat], None], *, eager: bool) -> ForkedProcess:
        tasks, to_tasks = Pipe(duplex=False)
        from_told, told = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        dumped, parent = os.memfd_create("trivet-stacks"), os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                faulthandler.register(signal.SIGUSR1, dumped, all_threads=True)
                die_with_parent(parent)
                serve(Seat(tasks, told, self.shared, self.races, self.exchanged, eager))
            except BaseException as error:
                with contextlib.suppress(OSError):
                    told.send((RAISED, _make_sendable(error)))
            leave(0)
        tasks.close()
        told.close()
        return ForkedProcess(pid, to_tasks, from_told, dumped)


def innermost(stacks: str) -> str:
    """Return the innermost call of the main thread, as ``FILE:LINE in FUNCTION``; empty if it is not known."""
    frames = _FRAME.findall(stacks.rpartition("most recent call first")[2])
    return "{}:{} in {}".format(*frames[0]) if frames else ""


def can_fork() -> bool:
    """Return whether forks of this process may use a GPU: CUDA, which an import may start, cannot be started
    twice. They may not if that cannot be seen.
    """
    try:
        return _MEMORY_DEVICE not in open_files()
    except OSError:
        return False


def _make_sendable(error: BaseException) -> BaseException:
    """Return the error, or one with the same message if another process could not read it."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - this process's own
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
