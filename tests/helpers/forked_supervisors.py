"""Supervisors that are forked from a process which has imported what they, their launchers and their ranks need.

What runs is what ``python -m workers.supervisor`` would run: keeper and launcher are processes of their own, with the
sessions, files, signals, command lines and environments that new interpreters would have. Only the imports are spared.
Those who listen at an address pass a supervisor's three standard files; they are answered its process id and, once it
has ended, its exit status.
"""

from __future__ import annotations

import io
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import IO, NoReturn

from workers.launcher import forked_ranks, program
from workers.linux import die_with_parent, present_as
from workers.supervisor import group, keeper

BEFOREHAND = (
    "torch.distributed.run",
    "workers.launcher.folder_rendezvous",
    "workers.launcher.preloading",
    "workers.rank.program",
    "workers.supervisor.attempt",
    "workers.supervisor.claim",
    "workers.supervisor.program",
)


@dataclass(frozen=True)
class Order:
    """Where somebody waits for a supervisor, and with what it is started."""

    address: str
    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str


def supervise(order: Order) -> int:
    """Be the parent of a supervisor until it ends."""
    die_with_parent()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fsencode(order.address))
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        pid = _fork(lambda: _be_supervisor(order, files))
        for file in files:
            os.close(file)
        connection.sendall(b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    return 0


def _fork(run: Callable[[], int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    return pid if pid else _end_with(run)


def _end_with(run: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        code = run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _be_supervisor(order: Order, files: Iterable[int]) -> int:
    os.setsid()
    _begin(order.command, order.environment, files)
    os.chdir(order.folder)
    setattr(group, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": ForkedKeeper}))  # noqa: B010
    return forked_ranks._run_as_main(list(order.command))


def _begin(command: Sequence[str], environment: Mapping[str, str], files: Iterable[int], kept: int = 2) -> None:
    """Take over standard files, of others only ``kept``; be for everybody else what the command would be."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    present_as(command, environment)
    forked_ranks._begin_computing_anew(environment)
    is_unbuffered = "-u" in command
    sys.stdout, sys.stderr = (_text(number, is_unbuffered=is_unbuffered or number == 2) for number in (1, 2))


def _text(number: int, *, is_unbuffered: bool) -> io.TextIOWrapper:
    raw = os.fdopen(number, "wb", 0 if is_unbuffered else -1, closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=is_unbuffered)


class ForkedKeeper:
    """What a supervisor uses of :class:`subprocess.Popen`, for the command of its keeper."""

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        env: Mapping[str, str],
        pass_fds: tuple[int],
        start_new_session: bool,
    ) -> None:
        assert (stdin, start_new_session) == (subprocess.PIPE, True)
        assert keeper.__file__ in command
        reader, writer = os.pipe()
        files = (reader, stdout.fileno(), stderr.fileno())
        self.pid = _fork(lambda: _be_keeper(command, env, files, *pass_fds))
        os.close(reader)
        self.stdin = os.fdopen(writer, "wb")
        self._ended = os.pidfd_open(self.pid)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("keeper", timeout or 0)
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)


def _be_keeper(command: list[str], environment: Mapping[str, str], files: Iterable[int], life: int) -> int:
    os.setsid()
    _begin(command, environment, files, kept=life)
    setattr(os, "posix_spawn", _spawn_launcher)  # noqa: B010 - the one command of this process
    return keeper.main(command[command.index(keeper.__file__) + 1 :])


def _spawn_launcher(_: str, command: list[str], environment: Mapping[str, str], *, setsigdef: Iterable[int]) -> int:
    return _fork(lambda: _be_launcher(command, dict(environment), setsigdef))


def _be_launcher(command: list[str], environment: Mapping[str, str], defaults: Iterable[int]) -> int:
    signal.set_wakeup_fd(-1)
    for number in defaults:
        signal.signal(number, signal.SIG_DFL)
    _begin(command, environment, (0, 1, 2))
    sys.argv = command[command.index("workers.launcher") :]
    return program.main()
