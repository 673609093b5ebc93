"""Makes a fork equal to a new program, except for its imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from service.linux import leave, open_files

_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
"""Signals that one of Trivet's processes or torchrun handles, besides SIGINT."""
HELD_BACK = (*_HANDLED, signal.SIGINT)
"""Signals that wait while a fork is made: in a fork, its parent's handlers would act as a second parent."""
_POLL_S = 0.01
_DEVICES = "/dev/nvidia"


class Child:
    """A fork of this process, with the used part of :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, once the program has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        """Kill it, if it has not been seen to end."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def threads() -> list[str]:
    """Return the names of this process's threads. With more than one, a lock may stay locked in a fork for ever."""
    return [(task / "comm").read_text(errors="replace").strip() for task in Path("/proc/self/task").iterdir()]


def open_devices() -> list[str]:
    """Return the GPU devices that this process has open: forks of one that has initialised CUDA cannot use it."""
    return [name for name in open_files() if name.startswith(_DEVICES)]


def fork(
    program: Callable[[], int],
    *,
    stdin: int,
    output: int | None = None,
    keep: Collection[int] = (),
    session: bool = True,
) -> Child:
    """Run ``program`` in a fork, which ends with the code that it returns, 1 after an exception.

    It has only the descriptors to ``keep`` and the standard ones: ``stdin``, and ``output`` in place of this
    process's own output. Signals act there as in a new program, and by default it leads its own session.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    held_before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        pid = os.fork()
        if pid == 0:
            _be(program, stdin, output, keep, session=session, held_before=held_before)
        return Child(pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held_before)


def _be(
    program: Callable[[], int],
    stdin: int,
    output: int | None,
    keep: Collection[int],
    *,
    session: bool,
    held_before: Collection[signal.Signals | int],
) -> NoReturn:
    code = 1
    try:
        if session:
            os.setsid()
        let_signals_be()
        os.dup2(stdin, 0)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        close_others(keep)
        signal.pthread_sigmask(signal.SIG_SETMASK, held_before)
        code = program()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    leave(code)


def let_signals_be() -> None:
    """Let signals act as on a new Python program."""
    signal.set_wakeup_fd(-1)
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def empty_input() -> None:
    """Let standard input have nothing to read."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def close_others(keep: Collection[int] = ()) -> None:
    """Close all descriptors but the standard ones and those to ``keep``, and forget the folder of temporary files."""
    start = 3
    for kept in sorted(keep):
        os.closerange(start, kept)
        start = max(start, kept + 1)
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))
    tempfile.tempdir = None
