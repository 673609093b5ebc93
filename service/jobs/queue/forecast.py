"""Estimates when pending jobs may start, from how long running and earlier jobs take.

Time is played forward: a running job ends when its own progress, earlier jobs of its kind or its time limit say so, and
pending jobs are placed in order as devices come free. A job without any of these never ends here, so that a job which
waits for it gets no estimate rather than an invented one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from service.jobs.projects import DEFAULT_PROJECT
from service.jobs.queue.fair_share import PendingJob

Basis = Literal["progress", "durations", "limits"]
"""What an expected end rests on: the job's own progress, how long earlier jobs of its kind took, its time limit."""

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
    """Counts the devices of the hosts that take work, by pool and host: those that are free, and all."""

    free: Mapping[str, Mapping[str, int]]
    total: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class RunningJob:
    """A job that holds devices: counts by host, of one pool. ``left`` is absent where nothing tells when it ends."""

    pool: str
    devices: Mapping[str, int]
    left: Known | None
    project: str = DEFAULT_PROJECT


@dataclass(frozen=True)
class Start:
    """Estimates when a job may start, in seconds from now. It rests on nothing where the job fits already."""

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

    ``queue`` is in order; ``typical_s`` is how long jobs of a kind take; ``room`` is how many more devices projects may
    hold that have a quota of them, minus infinity where they may start nothing until nobody knows when.
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
    """Devices that come free, by host, and the bases of that moment."""

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
    """How many more devices projects may hold, of those that have a quota."""
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
        """Start what fits, in order; return the rest. Nothing of a pool overtakes a job that has waited too long."""
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
    """Return how many devices of which hosts the job takes, those with most of them first; ``None`` if it does not
    fit. One host by best fit, where one is enough.
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
