"""Lets torchrun start ranks as forks of its own process, which has imported what they need, in place of new
interpreters that would each import it again.

A fork runs what its command line says (``python … -m MODULE`` or a script) as ``__main__``, and is for everybody else
what that command would be: its own session, environment and command line, signals as at the start of a program, no
descriptor but the standard ones. Where a fork could not go on, since its parent has other threads or has initialised
CUDA, it becomes a new interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from workers.launcher import import_values
from workers.linux import present_as

_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torchrun handles, besides SIGINT."""
_HELD_BACK = (*_HANDLED, signal.SIGINT)
"""Signals that wait while a fork is made: in a fork, torchrun's handlers would have it act as a second torchrun."""
_POLL_S = 0.01


class ForkError(RuntimeError):
    """This version of torch starts ranks in another way."""


def threads() -> list[str]:
    """Return the names of this process's threads. With more than one, a fork may find a lock locked for ever."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def fork_ranks(environment: Mapping[str, str]) -> None:
    """Have torchrun fork its ranks from now on. ``environment`` is theirs besides what torchrun sets."""
    if not hasattr(api, "get_subprocess_handler"):
        raise ForkError("this version of torch starts ranks in another way; Trivet knows 2.11 to 2.13")
    gc.freeze()  # so that no fork copies the pages of all objects with its first collection

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            set_by_torchrun = {name: value for name, value in env.items() if os.environ.get(name) != value}
            return ForkedProgram(args, {**environment, **set_by_torchrun})

    api.get_subprocess_handler = Handler


class ForkedProgram:
    """A fork that runs a Python program, with as much of :class:`subprocess.Popen` as torchrun uses."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        is_alone = len(threads()) == 1
        held_before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _run(list(arguments), dict(environment), held_before, is_alone=is_alone)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_before)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, once the program has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code; raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(_POLL_S)
        return code


def _run(
    arguments: list[str], environment: dict[str, str], held_back: Iterable[signal.Signals | int], *, is_alone: bool
) -> NoReturn:
    """Be the program from here to its end. Signals other than ``held_back`` reach it once they do what they would do to
    a new program.
    """
    code = 1
    try:
        _begin_anew(environment)
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
        if not is_alone or torch.cuda._is_in_bad_fork():
            os.execve(arguments[0], arguments, environment)  # noqa: S606 - there is nothing for a shell to do
        present_as(arguments, environment)
        _begin_computing_anew(environment)
        code = _run_as_main(arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not what the parent registered to happen at an exit of its own, nor its finalisation.
    os._exit(code)


def _begin_anew(environment: dict[str, str]) -> None:
    """Undo what a fork has from its parent and a new program has not."""
    os.setsid()
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None


def _begin_computing_anew(environment: Mapping[str, str]) -> None:
    """Set what libraries read from the environment, or draw at random, when they are imported."""
    if (threads := environment.get("OMP_NUM_THREADS", "")).isdecimal():
        torch.set_num_threads(max(1, int(threads)))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    import_values.recompute(environment)


def _run_as_main(arguments: list[str]) -> int:
    """Run ``python [-u] -m MODULE …`` or ``python [-u] SCRIPT …``; its exit code."""
    rest = [word for word in arguments[1:] if word != "-u"]
    try:
        if rest[0] == "-m":
            sys.argv = rest[1:]
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = rest
            runpy.run_path(rest[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
