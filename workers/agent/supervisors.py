"""Starts supervisors as processes that live on by themselves: forks of the host's fork server, or new interpreters."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from service.jobs.host import Process
from service.jobs.records import AttemptRef
from workers.agent.fork_servers import KeptForkServer
from workers.supervisor.program import FORK_SERVER, LIGHT_FORK_SERVER
from workers.supervisor.settings import SupervisorOrder

SUPERVISOR: tuple[str, ...] = (sys.executable, "-m", "workers.supervisor")

logger = logging.getLogger(__name__)


class Supervisors:
    """Thread-safe. With ``forks`` it keeps a fork server, which ends with this process. Without a ready server,
    a supervisor is a new interpreter. When a server has forked nothing for ``idle_s`` (0: for ever) while nothing is at
    work, a light one takes its place, so that its memory is free; another full one follows the first supervisor after
    that. A server that failed is started again ``restart_after_s`` later, and later with each failure.
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
        self._full = KeptForkServer([*command, FORK_SERVER], log, restart_after_s)
        self._light = KeptForkServer([*command, LIGHT_FORK_SERVER], log, restart_after_s)
        self._lock = threading.Lock()

    def start(self, order: SupervisorOrder) -> None:
        """Have a supervisor carry out the order; return as soon as it has the order. A part that has a
        supervisor keeps it: on a busy host the message comes again before the part is claimed, and more
        supervisors would only make the host busier.
        """
        with self._lock:
            if (known := self._parts.get(order.ref)) is not None and _is_alive(known):
                return
            self._needed_at = time.monotonic()
            self._full.postpone()
            server = self._full.ready() or self._light.ready()
        fork = server.fork() if server is not None else None
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
            if self._started or self._forked:
                self._needed_at = time.monotonic()
            if self._forks:
                self._tend_servers()

    def _tend_servers(self) -> None:
        if 0 < self._idle_s <= time.monotonic() - self._needed_at:
            if self._full.process is not None:
                logger.info("no job started for %g s: torch is imported again for the next", self._idle_s)
            self._full.close()
            self._light.keep()
        else:
            self._full.keep()
            if self._full.ready():
                self._light.close()

    def close(self) -> None:
        """End the fork servers; supervisors at work are left alone."""
        with self._lock:
            self._forks = False
            self._full.close()
            self._light.close()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        # It is collected as soon as it ends, as the kernel does it for forks.
        threading.Thread(target=process.wait, name=f"supervisor {process.pid}", daemon=True).start()
        return process


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
