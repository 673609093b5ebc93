"""Keeps a process that forks supervisors (:mod:`workers.supervisor.fork_server`), and asks it for forks."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from service.jobs.host import Process
from service.linux import ROOM
from workers.supervisor.command import allowed
from workers.supervisor.fork_server import READY

_ANSWER_S = 30.0
"""Time within which a fork must answer; after that the server hangs or has been stopped."""
_LONGEST_PAUSE_S = 300.0
_PID_BYTES = 32

logger = logging.getLogger(__name__)


class KeptForkServer:
    """A fork server while :meth:`keep` is called. After one that failed, the next one starts ``restart_after_s`` later;
    the pause doubles with each failure.
    """

    def __init__(self, command: Sequence[str], log: Path, restart_after_s: float) -> None:
        self._command, self._log = list(command), log
        self._pause_s = self._restart_after_s = restart_after_s
        self._restart_at = 0.0
        self.process: ForkServerProcess | None = None

    def keep(self) -> None:
        """Start the process if it is due; collect it if it has ended."""
        if self.process is not None and self.process.has_ended():
            was_of_use = self.process.is_ready()
            self._pause_s = self._restart_after_s if was_of_use else min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._restart_at = time.monotonic() + (0.0 if was_of_use else self._pause_s)
            self.close()
        if self.process is None and time.monotonic() >= self._restart_at:
            self.process = ForkServerProcess(self._command, self._log)

    def postpone(self) -> None:
        """Start no process for a while: its imports would take the processor from others."""
        if self.process is None:
            self._restart_at = max(self._restart_at, time.monotonic() + self._restart_after_s)

    def ready(self) -> ForkServerProcess | None:
        """Return the process if it can fork now."""
        return self.process if self.process is not None and self.process.is_ready() else None

    def close(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.close()
            self.process = None


@dataclass(frozen=True)
class Fork:
    """A supervisor that waits for its environment and its order at the other end of the connection."""

    process: Process
    connection: socket.socket


class ForkServerProcess:
    """The process of :mod:`workers.supervisor.fork_server`, which learns nothing that a rank may not know."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._is_ready = False
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [command[0], "-u", "-P", *command[1:]],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                env={**allowed(os.environ), **ROOM},
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Return whether it has imported everything."""
        if not self._is_ready:
            with contextlib.suppress(OSError):
                self._is_ready = self._control.recv(len(READY)) == READY
        return self._is_ready

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self) -> Fork | None:
        """Return a new supervisor; None if the server has ended or hangs. A server that hangs is then ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except OSError as error:
                logger.warning("the fork server takes no requests: %s", error)
                self._process.kill()
                ours.close()
                return None
        ours.settimeout(_ANSWER_S)
        try:
            if (said := ours.recv(_PID_BYTES)) and (process := Process.of(int(said))):
                ours.settimeout(None)
                return Fork(process, ours)
        except TimeoutError:
            logger.warning("the fork server did not answer within %g s", _ANSWER_S)
            self._process.kill()
        except OSError:
            pass
        ours.close()
        return None

    def close(self) -> None:
        """End it; its forks live on."""
        self._process.kill()
        self._process.wait()
        self._control.close()
