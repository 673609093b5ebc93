"""Estimates when pending jobs may start, from how long running and earlier jobs take.

It plays time forward: a running job ends when its own progress, earlier jobs of its kind or its time limit say
so, and pending jobs are placed in order as devices come free. A job without any of these never ends here, so a
job that waits for it gets no estimate rather than an invented one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from service.jobs.accounts import DEFAULT_PROJECT
from service.jobs.queue.fair_share import PendingJob

Basis = Literal["progress", "durations", "limits"]
"""The bases of an expected end: the job's own progress, the durations of earlier jobs of its kind, its time limit."""

MOST_JOBS = 200
"""Pending jobs, first in order, that have estimates."""
_MOST_ENDINGS = 2000


@dataclass(frozen=True)
class Known:
    """Holds an expected number of seconds and its basis."""

    seconds: float
    basis: Basis


@dataclass(frozen=True)
class Fleet:
    """The devices of the hosts that take work, by pool and host: free ones, and all."""

    free: Mapping[str, Mapping[str, int]]
    total: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class RunningJob:
    """A job that holds devices: counts by host, of one pool. ``left`` is absent if its end is unknown."""

    pool: str
    devices: Mapping[str, int]
    left: Known | None
    project: str = DEFAULT_PROJECT


@dataclass(frozen=True)
class Start:
    """The estimated start of a job, in seconds from now. It has no basis if the job fits already."""

    in_s: float
    rests_on: frozenset[Basis]


def expected(typical_s: float | None, timeout_s: float | None, elapsed_s: float = 0.0) -> Known | None:
    """Return how much longer a job that has run for ``elapsed_s`` may take, or ``None`` if nothing is known.

    A job that has run longer than is typical is not typical: then only its limit counts.
    """
    limit = None if timeout_s is None else max(timeout_s - elapsed_s, 0.0)
    if typical_s is not None and typical_s > elapsed_s:
        left = typical_s - elapsed_s
        return Known(left, "durations") if limit is None or left <= limit else Known(limit, "limits")
    return None if limit is None else Known(limit, "limits")


def forecast(
    fleet: Fleet,
    running: Sequence[RunningJob],
    queue: Sequence[PendingJob],
    typical_s: Mapping[str, float],
    *,
    now_ms: int,
    max_queue_bypass_s: float,
    room: Mapping[str, float] | None = None,
) -> dict[str, Start]:
    """Return estimates for those of the first :data:`MOST_JOBS` of the queue that have one, by id.

    ``queue`` is in order; ``typical_s`` is the typical duration by kind; ``room`` is the number of further
    devices for projects with a quota, minus infinity if a project may start nothing for an unknown time.
    """
    free = {pool: dict(hosts) for pool, hosts in fleet.free.items()}
    play = _Play(free, fleet.total, now_ms, max_queue_bypass_s * 1000, dict(room or {}))
    for job in running:
        if job.left is not None:
            play.end_later(job.left.seconds, _Ending(job.pool, job.project, job.devices, frozenset({job.left.basis})))
    waiting = list(queue[:MOST_JOBS])
    for _ in range(_MOST_ENDINGS):
        waiting = play.place(waiting, typical_s)
        if not waiting or not play.advance():
            break
    return play.starts


@dataclass(frozen=True)
class _Ending:
    """Devices that come free, by host, with the bases of that moment."""

    pool: str
    project: str
    devices: Mapping[str, int]
    basis: frozenset[Basis]


@dataclass
class _Play:
    """The fleet at one moment of the future."""

    free: dict[str, dict[str, int]]
    total: Mapping[str, Mapping[str, int]]
    now_ms: int
    bypass_ms: float
    room: dict[str, float]
    """Further devices that projects with a quota may hold."""
    at_s: float = 0.0
    starts: dict[str, Start] = field(default_factory=dict)
    _endings: list[tuple[float, int, _Ending]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)
    _basis: dict[str, frozenset[Basis]] = field(default_factory=dict)
    """The bases of the devices that are free by now, by pool."""
    _room_basis: dict[str, frozenset[Basis]] = field(default_factory=dict)
    """The bases of the room that projects have by now."""

    def end_later(self, at_s: float, ending: _Ending) -> None:
        heapq.heappush(self._endings, (at_s, next(self._count), ending))

    def advance(self) -> bool:
        """Advance to the next moment at which devices come free; ``False`` if none is known."""
        if not self._endings:
            return False
        self.at_s = self._endings[0][0]
        while self._endings and self._endings[0][0] <= self.at_s:
            ending = heapq.heappop(self._endings)[2]
            hosts = self.free.setdefault(ending.pool, {})
            for host in ending.devices.keys() & hosts.keys():
                hosts[host] += ending.devices[host]
            self._basis[ending.pool] = self._basis.get(ending.pool, frozenset()) | ending.basis
            if ending.project in self.room:
                self.room[ending.project] += sum(ending.devices.values())
                known = self._room_basis.get(ending.project, frozenset())
                self._room_basis[ending.project] = known | ending.basis
        return True

    def place(self, waiting: Sequence[PendingJob], typical_s: Mapping[str, float]) -> list[PendingJob]:
        """Start jobs that fit, in order; return the rest. No job of a pool overtakes one that has waited too long."""
        left, closed = list[PendingJob](), set[str]()
        for job in waiting:
            if job.ranks > self.room.get(job.project, math.inf):
                left.append(job)
                continue
            devices = None if job.pool in closed else _choose(self.free.get(job.pool, {}), job)
            if devices is None:
                left.append(job)
                waited_ms = self.now_ms + self.at_s * 1000 - job.queued_at_ms
                if waited_ms >= self.bypass_ms and _choose(self.total.get(job.pool, {}), job) is not None:
                    closed.add(job.pool)
                continue
            basis = self._basis.get(job.pool, frozenset()) | self._room_basis.get(job.project, frozenset())
            if job.project in self.room:
                self.room[job.project] -= job.ranks
            self.starts[job.id] = Start(self.at_s, basis)
            for host, count in devices.items():
                self.free[job.pool][host] -= count
            if (takes := expected(typical_s.get(job.kind), job.timeout_s)) is not None:
                self.end_later(
                    self.at_s + takes.seconds, _Ending(job.pool, job.project, devices, basis | {takes.basis})
                )
        return left


def _choose(free: Mapping[str, int], job: PendingJob) -> dict[str, int] | None:
    """Return the devices that the job takes, by host, most first; ``None`` if it does not fit. If one host is
    enough, it is chosen by best fit.
    """
    fitting = [host for host, count in free.items() if count >= job.ranks]
    if fitting:
        return {min(fitting, key=lambda host: (free[host], host)): job.ranks}
    if job.max_hosts == 1:
        return None
    chosen, rest = dict[str, int](), job.ranks
    for host in heapq.nsmallest(job.max_hosts, free, key=lambda host: (-free[host], host)):
        chosen[host] = min(free[host], rest)
        rest -= chosen[host]
    return chosen if rest == 0 else None
