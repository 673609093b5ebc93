"""Starts supervisors as detached processes, and keeps spares that are warm before they are needed."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from workers.supervisor.orders import SupervisorOrder


class Supervisors:
    """Thread-safe. A supervisor with an order lives on by itself; a spare ends when this process does."""

    def __init__(self, command: Sequence[str], log: Path, spares: int, refill_after_s: float) -> None:
        self._command, self._log, self._wanted = list(command), log, spares
        self._spares: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._refill_at, self._refill_after_s = 0.0, refill_after_s
        self._closed = False
        self._lock = threading.Lock()

    def start(self, order: SupervisorOrder) -> None:
        """Give the order to a spare, or to a new process; returns at once."""
        with self._lock:
            taken = any(self._give(self._spares.pop(0), order) for _ in range(len(self._spares)))
            if not taken and not self._give(self._spawn(), order):
                raise RuntimeError(f"no supervisor could be started for {order.ref}; see {self._log}")
            self._refill_at = time.monotonic() + self._refill_after_s

    def at_work(self) -> list[int]:
        """Return the pids of those that were given an order here and have not ended."""
        with self._lock:
            return [process.pid for process in self._started if process.poll() is None]

    def tend(self) -> None:
        """Collect what has ended, and start spares that are due; to be called now and then."""
        with self._lock:
            self._started = [process for process in self._started if process.poll() is None]
            self._spares = [process for process in self._spares if process.poll() is None]
            if time.monotonic() >= self._refill_at and not self._closed:
                self._spares += [self._spawn() for _ in range(self._wanted - len(self._spares))]

    def close(self) -> None:
        """Let the spares go; supervisors at work are left alone."""
        with self._lock:
            self._closed = True
            for process in self._spares:
                if process.stdin is not None:
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.close()
            for process in self._spares:
                process.wait()
            self._spares = []

    def _give(self, process: subprocess.Popen[bytes], order: SupervisorOrder) -> bool:
        """Return whether the process took the order; one that has ended cannot."""
        assert process.stdin is not None
        try:
            with process.stdin as pipe:
                pipe.write(order.to_line())
        except BrokenPipeError:
            return False
        self._started.append(process)
        return True

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
