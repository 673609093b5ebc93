"""Chooses which running jobs make room for one of higher priority that fits nowhere.

A victim is ``preemptible``, has a lower priority and has run for a while, so that no job is stopped again and again
before it got anywhere. The fewest victims are chosen; of equally many those of the lowest priorities, and of these the
ones that lose the least work: device-seconds since they were placed. Nothing is stopped unless the job then fits.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from service.jobs.queue.fair_share import PendingJob

_MOST_TRIED = 12
"""The most possible victims whose subsets are all compared; more are chosen one by one."""


@dataclass(frozen=True)
class PreemptibleJob:
    """A running job that may be asked to make room; ``devices`` by host, of one pool."""

    id: str
    attempt: int
    priority: int
    pool: str
    devices: Mapping[str, int]
    ran_s: float

    @property
    def work(self) -> float:
        """Return the device-seconds since it was placed."""
        return sum(self.devices.values()) * self.ran_s


@dataclass(frozen=True)
class Preemption:
    """The jobs to stop, and the job that they make room for."""

    beneficiary: PendingJob
    victims: tuple[PreemptibleJob, ...]


def plan(
    waiting: Iterable[PendingJob],
    running: Sequence[PreemptibleJob],
    free: Mapping[str, Mapping[str, int]],
    min_run_s: float,
) -> Preemption | None:
    """Return the first preemption that lets one of the waiting jobs, which are in order, start; ``None`` if there is
    none.

    ``free`` counts devices of hosts that take work, by pool and host. A job that fits as it is needs no victims.
    """
    for job in waiting:
        hosts = free.get(job.pool, {})
        able = [
            other
            for other in running
            if other.pool == job.pool and other.priority < job.priority and other.ran_s >= min_run_s
        ]
        if not fits(job, hosts) and fits(job, _devices_freed(hosts, able)):
            return Preemption(job, _fewest(job, hosts, able))
    return None


def fits(job: PendingJob, free: Mapping[str, int]) -> bool:
    """Return whether as many hosts as the job may use have as many free devices as it needs."""
    return sum(heapq.nlargest(job.max_hosts, free.values())) >= job.ranks


def _devices_freed(free: Mapping[str, int], victims: Iterable[PreemptibleJob]) -> dict[str, int]:
    """Return the free devices once the victims have ended, on the hosts that take work."""
    counts = Counter(free)
    for victim in victims:
        counts.update({host: count for host, count in victim.devices.items() if host in free})
    return dict(counts)


def _fewest(job: PendingJob, free: Mapping[str, int], able: Sequence[PreemptibleJob]) -> tuple[PreemptibleJob, ...]:
    """Return the victims; all candidates together suffice."""
    if len(able) > _MOST_TRIED:
        able = _one_by_one(job, free, able)
    for count in range(1, min(len(able), _MOST_TRIED) + 1):
        enough = [some for some in itertools.combinations(able, count) if fits(job, _devices_freed(free, some))]
        if enough:
            return min(enough, key=_loss)
    return tuple(able)


def _loss(victims: Iterable[PreemptibleJob]) -> tuple[int, float, tuple[str, ...]]:
    chosen = tuple(victims)
    return (
        max(victim.priority for victim in chosen),
        sum(victim.work for victim in chosen),
        tuple(victim.id for victim in chosen),
    )


def _one_by_one(job: PendingJob, free: Mapping[str, int], able: Sequence[PreemptibleJob]) -> tuple[PreemptibleJob, ...]:
    """Return enough victims, none of which could be spared: start with all, then drop one after the other,
    those that lose the most first.
    """
    kept = sorted(able, key=lambda victim: (victim.priority, victim.work, victim.id))
    for victim in reversed(tuple(kept)):
        others = [other for other in kept if other is not victim]
        if fits(job, _devices_freed(free, others)):
            kept = others
    return tuple(kept)
