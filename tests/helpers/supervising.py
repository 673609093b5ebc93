"""A supervisor as its parent sees it: a program of its own, or a fork of a process that has imported what it needs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

from launching import LIMIT_SECONDS, NVIDIA, RankServers


class Supervisor(Protocol):
    """What tests use of :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, sig: int) -> None: ...


def start_supervisor(command: Sequence[str], servers: RankServers) -> Supervisor:
    """Start one that waits for its order, in a session of its own."""
    if NVIDIA.exists() or command[0] != sys.executable:
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    return ForkedSupervisor(command, servers)


class ForkedSupervisor:
    def __init__(self, command: Sequence[str], servers: RankServers) -> None:
        reader, writer = os.pipe()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("")  # to whatever name is free
            listening.listen()
            listening.settimeout(LIMIT_SECONDS)
            address = os.fsdecode(listening.getsockname())
            order = {"address": address, "command": command, "environment": dict(os.environ), "folder": str(Path.cwd())}
            servers.any().order(supervisor=order)
            self._connection, _ = listening.accept()
        socket.send_fds(self._connection, [b"."], [reader, 1, 2])
        os.close(reader)
        self._answers = self._connection.makefile("rb")
        self.pid = int(self._answers.readline())
        self.stdin: IO[bytes] | None = os.fdopen(writer, "wb")
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._code if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired("supervisor", timeout or 0)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may end between the two
            if self.poll() is None:
                os.kill(self.pid, sig)

    def _has_ended(self, timeout: float | None) -> bool:
        if self._code is None and select.select([self._connection], [], [], timeout)[0]:
            self._code = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
        return self._code is not None
