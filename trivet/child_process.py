"""Starts, watches, restarts and ends a process that is part of this machine's service."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from service.jobs.host import take_over, wait_or_kill


@dataclass(frozen=True)
class ServiceTimes:
    """Bounds how long the parts of this machine's service may take, in seconds."""

    ready_within_s: float = 60.0
    """Seconds for a part to answer after its start."""
    ends_within_s: float = 15.0
    """Seconds for a part to end when it is asked to; then it is killed."""
    report_within_s: float = 10.0
    """Seconds for a supervisor to report its attempt's end, beyond the grace of its ranks."""
    settled_s: float = 10.0
    """A process that ends sooner than this after its start will probably end again."""
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    """Longest pause before a process that keeps ending is started again; pauses double up to this."""


@dataclass
class Restarts:
    """Decides when a process that ended by itself is started again: at once, or after a pause that doubles
    while it keeps ending soon after its start. Times are on the monotonic clock, in seconds.
    """

    times: ServiceTimes = ServiceTimes()
    started_at: float = -inf
    due_at: float | None = None
    """When it will be started again; None while it runs."""
    pause_s: float = 0.0

    def ended(self, now: float) -> bool:
        """Plan the next start; return whether the end is news."""
        if self.due_at is not None:
            return False
        times = self.times
        settled = now - self.started_at > times.settled_s
        self.pause_s = 0.0 if settled else min(max(times.first_pause_s, 2 * self.pause_s), times.longest_pause_s)
        self.due_at = now + self.pause_s
        return True

    def is_due(self, now: float) -> bool:
        return self.due_at is not None and now >= self.due_at

    def started(self, now: float) -> None:
        self.started_at, self.due_at = now, None


@dataclass
class ChildProcess:
    """A child in its own session: Ctrl-C reaches only its parent, which ends the parts in order.

    It holds a lock beside its log. A child that outlived its parent is ended before another is started.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    descriptors: tuple[int, ...] = ()
    times: ServiceTimes = ServiceTimes()
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        self.start()

    def start(self) -> None:
        lock = take_over(lock_of(self.log), self.times.ends_within_s)
        try:
            with self.log.open("ab") as output:
                self.process = subprocess.Popen(
                    [sys.executable, *self.arguments],
                    env=dict(self.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=(*self.descriptors, lock.fileno()),
                )
        finally:
            lock.close()

    def end(self) -> None:
        self.process.terminate()
        wait_or_kill(self.process, self.times.ends_within_s)

    def last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])


def lock_of(log: Path) -> Path:
    """Return the path of the lock that the part with this log holds."""
    return log.with_suffix(".lock")
