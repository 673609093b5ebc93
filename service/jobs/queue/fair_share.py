"""Defines fair share between projects: how use is forgotten, and which project's job is next.

A project's **use** is the device-seconds that its jobs held, each worth half as much for every half-life since. With u
at some moment and n devices held from then on, after t seconds

    u(t) = u·2^(-t/h) + n·(h/ln 2)·(1 - 2^(-t/h)),

so whole histories are kept as one number. Its **share** is that use, and a minute ahead for every device that it holds,
over its weight: of two projects with jobs of equal priority the one with the smaller share is next. The minute ahead
spreads devices that come free together over projects that start out equal. ``store/lua/lib/fair_share.lua`` keeps and
compares shares by the same rules.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from service.jobs.accounts import DEFAULT_PROJECT


@dataclass(frozen=True)
class PendingJob:
    """A job that waits for devices: ``ranks`` of one ``pool``, on ``max_hosts`` hosts at most."""

    id: str
    kind: str
    owner: str
    pool: str
    ranks: int
    max_hosts: int
    priority: int
    queued_at_ms: int
    """By the store's own clock."""
    timeout_s: float | None = None
    project: str = DEFAULT_PROJECT


AHEAD_S = 60.0
"""Seconds ahead for which held devices count as used."""


@dataclass(frozen=True)
class Use:
    """The decayed device-seconds of a project, the devices that it holds at the moment, and its weight."""

    used_s: float = 0.0
    held: int = 0
    weight: float = 1.0

    @property
    def share(self) -> float:
        """Return the project's share; the smallest is next."""
        return (self.used_s + self.held * AHEAD_S) / self.weight

    def after(self, seconds: float, half_life_s: float) -> Use:
        """Return the use after some time with the same devices held."""
        kept = 2.0 ** (-seconds / half_life_s)
        return replace(self, used_s=self.used_s * kept + self.held * half_life_s / math.log(2) * (1 - kept))

    def holding(self, devices: int) -> Use:
        """Return the use with more devices held."""
        return replace(self, held=self.held + devices)


def in_order(
    jobs: Iterable[PendingJob], uses: Mapping[str, Use], *, now_ms: int, fair_share_bound_ms: float
) -> list[PendingJob]:
    """Return the jobs in the order of placement if all fit: higher priority first. Within one priority, jobs
    that have waited past the bound come first, by age; then comes the job that has waited longest of the
    project with the smallest share. A taken job counts for its project from then on.
    """
    left = defaultdict[str, Use](Use, uses)
    classes = defaultdict[int, list[PendingJob]](list)
    for job in jobs:
        classes[job.priority].append(job)
    ordered = list[PendingJob]()
    for priority in sorted(classes, reverse=True):
        by_age = sorted(classes[priority], key=_age)
        overdue = [job for job in by_age if now_ms - job.queued_at_ms >= fair_share_bound_ms]
        for job in overdue:
            left[job.project] = left[job.project].holding(job.ranks)
        ordered += overdue
        ordered += _by_share(by_age[len(overdue) :], left)
    return ordered


def _by_share(by_age: list[PendingJob], uses: dict[str, Use]) -> list[PendingJob]:
    """Take jobs one by one, each from the project with the smallest share by then; ``uses`` is updated."""
    queues = defaultdict[str, list[PendingJob]](list)
    for job in reversed(by_age):
        queues[job.project].append(job)
    heads = [(uses[project].share, _age(queue[-1]), project) for project, queue in queues.items()]
    heapq.heapify(heads)
    ordered = list[PendingJob]()
    while heads:
        project = heads[0][2]
        job = queues[project].pop()
        ordered.append(job)
        uses[project] = uses[project].holding(job.ranks)
        if queues[project]:
            heapq.heapreplace(heads, (uses[project].share, _age(queues[project][-1]), project))
        else:
            heapq.heappop(heads)
    return ordered


def _age(job: PendingJob) -> tuple[int, str]:
    return job.queued_at_ms, job.id
