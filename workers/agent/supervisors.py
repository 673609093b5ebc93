"""Starts supervisors as processes that live on by themselves: forks of the host's fork server, or new interpreters."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from service.jobs.host import Process
from service.jobs.records import AttemptRef
from workers.linux import ROOM
from workers.supervisor.command import allowed
from workers.supervisor.fork_server import READY
from workers.supervisor.program import FORK_SERVER
from workers.supervisor.settings import SupervisorOrder

SUPERVISOR: tuple[str, ...] = (sys.executable, "-m", "workers.supervisor")
_ANSWER_S = 30.0
"""Time within which a fork must answer; after that the server hangs or has been stopped."""
_LONGEST_PAUSE_S = 300.0
_PID_BYTES = 32

logger = logging.getLogger(__name__)


class Supervisors:
    """Thread-safe. With ``forks`` it keeps a fork server, which ends with this process. Without a ready server,
    a supervisor is a new interpreter. After a failed server, the next one starts ``restart_after_s`` later; the
    pause doubles with each failure. A server that has forked nothing for ``idle_s`` (0: for ever) while nothing is at
    work ends, so that its memory is free; the next one follows the first supervisor after that.
    """

    def __init__(
        self, command: Sequence[str], log: Path, *, forks: bool, restart_after_s: float, idle_s: float = 0.0
    ) -> None:
        self._command, self._log, self._forks, self._idle_s = list(command), log, forks, idle_s
        self._needed_at = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._started: list[subprocess.Popen[bytes]] = []
        self._forked: list[Process] = []
        self._parts: dict[AttemptRef, subprocess.Popen[bytes] | Process] = {}
        self._server: _ForkServerProcess | None = None
        self._pause_s = self._restart_after_s = restart_after_s
        self._restart_at = 0.0
        self._lock = threading.Lock()

    def start(self, order: SupervisorOrder) -> None:
        """Have a supervisor carry out the order; return as soon as it has the order. A part that has a
        supervisor keeps it: on a busy host the message comes again before the part is claimed, and more
        supervisors would only make the host busier.
        """
        with self._lock:
            if (known := self._parts.get(order.ref)) is not None and _is_alive(known):
                return
            now = self._needed_at = time.monotonic()
            if self._server is None:  # whose imports would take the processor from this supervisor's
                self._restart_at = max(self._restart_at, now + self._restart_after_s)
            server = self._server
        fork = server.fork() if server is not None and server.is_ready() else None
        if fork is not None and _sent(fork.connection, json.dumps(dict(os.environ)).encode() + b"\n" + order.to_line()):
            with self._lock:
                self._forked.append(fork.process)
                self._parts[order.ref] = fork.process
            return
        with self._lock:
            process = self._spawn()
            self._started.append(process)
            self._parts[order.ref] = process
        assert process.stdin is not None
        if not _sent(process.stdin, order.to_line()):
            raise RuntimeError(f"no supervisor could be started for {order.ref}; see {self._log}")

    def at_work(self) -> list[int]:
        """Return the pids of supervisors that got an order here and have not ended."""
        with self._lock:
            forked = [process.pid for process in self._forked if process.alive]
            return [process.pid for process in self._started if process.poll() is None] + forked

    def tend(self) -> None:
        """Forget ended processes, and start a fork server if one is due; call this now and then."""
        with self._lock:
            self._started = [process for process in self._started if process.poll() is None]
            self._forked = [process for process in self._forked if process.alive]
            self._parts = {ref: process for ref, process in self._parts.items() if _is_alive(process)}
            if self._server is not None and self._server.has_ended():
                was_of_use = self._server.is_ready()
                self._pause_s = self._restart_after_s if was_of_use else min(2 * self._pause_s, _LONGEST_PAUSE_S)
                self._restart_at = time.monotonic() + (0.0 if was_of_use else self._pause_s)
                self._server.close()
                self._server = None
            if self._started or self._forked:
                self._needed_at = time.monotonic()
            is_idle = 0 < self._idle_s <= time.monotonic() - self._needed_at
            if is_idle and self._server is not None:
                logger.info("no job started for %g s: the fork server ends, the next job starts another", self._idle_s)
                self._server.close()
                self._server = None
            if self._forks and not is_idle and self._server is None and time.monotonic() >= self._restart_at:
                self._server = _ForkServerProcess(self._command, self._log)

    def close(self) -> None:
        """End the fork server; supervisors at work are left alone."""
        with self._lock:
            self._forks = False
            if self._server is not None:
                self._server.close()
                self._server = None

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        # It is collected as soon as it ends, as the kernel does it for forks.
        threading.Thread(target=process.wait, name=f"supervisor {process.pid}", daemon=True).start()
        return process


@dataclass(frozen=True)
class _Fork:
    """A supervisor that waits for its environment and its order at the other end of the connection."""

    process: Process
    connection: socket.socket


class _ForkServerProcess:
    """The process of :mod:`workers.supervisor.fork_server`, which learns nothing that a rank may not know."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._is_ready = False
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [command[0], "-u", "-P", *command[1:], FORK_SERVER],
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

    def fork(self) -> _Fork | None:
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
                return _Fork(process, ours)
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


def _is_alive(process: subprocess.Popen[bytes] | Process) -> bool:
    return process.alive if isinstance(process, Process) else process.poll() is None


def _sent(to: IO[bytes] | socket.socket, text: bytes) -> bool:
    """Write all of a supervisor's input; return whether it read it."""
    try:
        if isinstance(to, socket.socket):
            with to:
                to.sendall(text)
        else:
            with to:
                to.write(text)
    except OSError:
        return False
    return True
