"""Reads the queue, in the order of fair share, with each job's reason to wait and its likely start."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import orjson

from service.jobs.accounts import DEFAULT_PROJECT
from service.jobs.events import LATEST
from service.jobs.queue.fair_share import PendingJob, Use, in_order
from service.jobs.queue.forecast import Fleet, Known, RunningJob, Start, expected, forecast
from service.jobs.records import Host, Problem, ProjectShare, QueueLine, QueuePage, Rejected, StartEstimate
from service.jobs.records.store_limits import StoreLimits
from service.jobs.spec.common import ACTIVE
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.hosts import HostStore, free_devices
from service.jobs.store.keyspace import CAPACITY, WEIGHTS

HEAVIEST = 1e6


@dataclass(frozen=True)
class Shares:
    """Fair share of the projects. The scripts that allocate and free devices charge the use."""

    client: BrokerClient
    limits: StoreLimits

    def uses(self) -> dict[str, Use]:
        """Return the use of each project that has any, or whose weight is not 1."""
        rows = stubs.read_uses(self.client, self.limits.script_argument)
        return {
            project: Use(float(used_ms) / 1000, int(held), float(weight)) for project, used_ms, held, weight in rows
        }

    def list(self) -> list[ProjectShare]:
        """List projects by share, the one whose jobs are next first."""
        uses = sorted(self.uses().items(), key=lambda item: (item[1].share, item[0]))
        return [_record(project, use) for project, use in uses]

    def weigh(self, project: str, weight: float) -> ProjectShare:
        """Give a project a weight: one of weight 2 may use twice as much as one of weight 1.

        Raises :class:`Rejected` for a weight that is out of range.
        """
        if not (math.isfinite(weight) and 1 / HEAVIEST <= weight <= HEAVIEST):
            problem = Problem("weight", "out of range", weight, f"{1 / HEAVIEST:g} to {HEAVIEST:g}")
            raise Rejected([problem])
        if weight == 1:
            self.client.call("HDEL", WEIGHTS(), project)
        else:
            self.client.call("HSET", WEIGHTS(), project, repr(float(weight)))
        return _record(project, self.uses().get(project, Use(weight=weight)))


def _record(project: str, use: Use) -> ProjectShare:
    return ProjectShare(project=project, weight=use.weight, used_s=use.used_s, devices=use.held, share=use.share)


_PIECE = 100
"""The most jobs that one script reads: the broker does nothing else meanwhile."""
_RECENT = 200
_FEWEST_DURATIONS = 3
"""Ended jobs of a kind from which the duration of the next one is estimated."""
_FEW = 1000
"""The most queued jobs that are read anew for each reader."""
_KEPT_FOR = 10.0
"""A larger snapshot is used for so many times as long as it took to make: reads then take at most about a tenth
of the time, with any number of readers."""


@dataclass(frozen=True)
class WaitingJob:
    """A queued job with its owner and project; ``place`` is absent while it waits for other jobs."""

    id: str
    owner: str
    project: str
    place: int | None


@dataclass(frozen=True)
class QueueSnapshot:
    """The queue at one moment: first the jobs that wait for devices, in the order of placement, then those that wait
    for jobs.
    """

    jobs: tuple[WaitingJob, ...]
    pending: int
    starts: dict[str, Start]
    taken_at: datetime


@dataclass
class _Kept:
    snapshot: QueueSnapshot | None = None
    until: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Queue:
    """Lists waiting jobs. All threads of a process share one snapshot at a time."""

    client: BrokerClient
    limits: StoreLimits
    hosts: HostStore
    shares: Shares
    _kept: _Kept = field(default_factory=_Kept)

    def page(
        self,
        limit: int = 50,
        cursor: str | None = None,
        *,
        job_id: str | None = None,
        owner: str | None = None,
        project: str | None = None,
        may_see: Callable[[WaitingJob], bool] = lambda _: True,
    ) -> QueuePage:
        """Return lines of the queue in order. Places count every job, also those that are not listed.

        The queue moves between pages: a cursor is a position in it. Raises :class:`Rejected` for an invalid cursor.
        """
        start = _position(cursor)
        snapshot = self.snapshot()
        chosen, next_cursor = list[WaitingJob](), None
        for index, job in enumerate(snapshot.jobs[start:], start):
            named = ((job_id, job.id), (owner, job.owner), (project, job.project))
            if any(wanted not in (None, value) for wanted, value in named) or not may_see(job):
                continue
            if len(chosen) == limit:
                next_cursor = str(index)
                break
            chosen.append(job)
        return QueuePage(
            items=tuple(self._lines(chosen, snapshot)),
            pending=snapshot.pending,
            dependent=len(snapshot.jobs) - snapshot.pending,
            next_cursor=next_cursor,
        )

    def snapshot(self) -> QueueSnapshot:
        """Return the whole queue: as it is or, if it is long, as it was a moment ago. It is read in pieces, so
        that no script takes long.
        """
        with self._kept.lock:
            began = time.monotonic()
            if self._kept.snapshot is None or began >= self._kept.until:
                self._kept.snapshot = self._read()
                took = time.monotonic() - began
                is_long = len(self._kept.snapshot.jobs) > _FEW
                self._kept.until = began + (1 + _KEPT_FOR) * took if is_long else 0.0
            return self._kept.snapshot

    def _lines(self, jobs: list[WaitingJob], snapshot: QueueSnapshot) -> Iterator[QueueLine]:
        pieces = (jobs[first : first + _PIECE] for first in range(0, len(jobs), _PIECE))
        read = (
            decode.fields_of(flat)
            for piece in pieces
            for flat in stubs.waiting(self.client, *(job.id for job in piece))
        )
        views = {view["id"]: view for view in read}
        for job in jobs:
            if (view := views.get(job.id)) is not None:
                yield QueueLine(
                    job=job.id,
                    kind=view["kind"],
                    name=view["name"],
                    owner=job.owner,
                    project=job.project,
                    priority=int(view["priority"]),
                    place=job.place,
                    reason=decode.reason_of(view),
                    start=_estimate(snapshot, job.id),
                )

    def _read(self) -> QueueSnapshot:
        hosts = self.hosts.list()
        capacity = self.hosts.capacity()
        auto = "cpu" if capacity is None else capacity.auto_pool
        now_ms, queued = self._read_queued(auto)
        pending = [job for job, waits_for_devices in queued if waits_for_devices]
        dependent = [
            WaitingJob(job.id, job.owner, job.project, None)
            for job, waits_for_devices in queued
            if not waits_for_devices
        ]
        ordered = in_order(
            pending, self.shares.uses(), now_ms=now_ms, fair_share_bound_ms=self.limits.longest_overtaken_s * 1000
        )
        typical_s = self._typical_durations()
        starts = forecast(
            _fleet(hosts),
            list(self._running(typical_s)) if ordered else [],
            ordered,
            typical_s,
            now_ms=now_ms,
            max_queue_bypass_s=self.limits.max_queue_bypass_s,
            room=self._room(),
        )
        placed = [WaitingJob(job.id, job.owner, job.project, place) for place, job in enumerate(ordered, 1)]
        return QueueSnapshot((*placed, *dependent), len(placed), starts, datetime.now(UTC))

    def _read_queued(self, auto: str) -> tuple[int, list[tuple[PendingJob, bool]]]:
        """Return the store's time, and each queued job with whether it waits for devices."""
        after, queued = "", list[tuple[PendingJob, bool]]()
        while True:
            now_ms, *rows = stubs.read_queue(self.client, after, _PIECE)
            queued += ((pending_job(dict(zip(_QUEUED, row, strict=True)), auto), row[1] == "1") for row in rows)
            if len(rows) < _PIECE:
                return now_ms, queued
            after = rows[-1][0]

    def _running(self, typical_s: dict[str, float]) -> Iterator[RunningJob]:
        for state in sorted(ACTIVE):
            after = ""
            while True:
                rows = stubs.read_running(self.client, state, after, _PIECE)
                yield from (_running_job(row, typical_s) for row in rows)
                if len(rows) < _PIECE:
                    break
                after = rows[-1][0]

    def _room(self) -> dict[str, float]:
        """Return how many more devices projects may hold, as of the last placement."""
        seen = orjson.loads(self.client.call("GET", CAPACITY()) or "{}").get("projects", {})
        return {
            project: -math.inf if "hours" in bound else bound["devices"] - bound["held"]
            for project, bound in seen.items()
            if "hours" in bound or "devices" in bound
        }

    def _typical_durations(self) -> dict[str, float]:
        """Return the median duration in seconds of recent jobs of each kind that had enough of them."""
        flat = stubs.recent_durations(self.client, _RECENT)
        seen = defaultdict[str, list[float]](list)
        for kind, milliseconds in zip(flat[::2], flat[1::2], strict=True):
            seen[kind].append(float(milliseconds) / 1000)
        return {kind: statistics.median(took) for kind, took in seen.items() if len(took) >= _FEWEST_DURATIONS}


def _position(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 10):
        raise Rejected([Problem("cursor", "not a cursor of the queue", cursor, "the next_cursor of a page")])
    return int(cursor)


_QUEUED = ("id", "waits", "shape", "priority", "queued_at", "kind", "owner", "timeout_s", "project")
"""The fields that ``lua/read_queue.lua`` returns of a job, in order."""


def pending_job(view: Mapping[str, str], auto: str) -> PendingJob:
    """Return a job from the fields of its record; one that asks for any devices draws from the pool ``auto``."""
    device, ranks, max_hosts = view["shape"].split(":")
    timeout_s = view.get("timeout_s")
    return PendingJob(
        id=view["id"],
        kind=view["kind"],
        owner=view["owner"],
        pool=auto if device == "auto" else device,
        ranks=int(ranks),
        max_hosts=int(max_hosts),
        priority=int(view["priority"]),
        queued_at_ms=int(view["queued_at"]),
        timeout_s=float(timeout_s) if timeout_s else None,
        project=view.get("project") or DEFAULT_PROJECT,
    )


def _running_job(row: list[str], typical_s: dict[str, float]) -> RunningJob:
    _, kind, timeout_s, progress, placement, elapsed_ms, project = row
    left_s = orjson.loads(progress).get("left_s") if progress else None
    limit_s = float(timeout_s) if timeout_s else None
    shares = decode.shares(placement)
    return RunningJob(
        pool=shares[0].pool if shares else "cpu",
        devices={share.host: len(share.devices) for share in shares},
        left=expected(typical_s.get(kind), limit_s, float(elapsed_ms) / 1000)
        if left_s is None
        else Known(float(left_s), "progress"),
        project=project or DEFAULT_PROJECT,
    )


def _fleet(hosts: list[Host]) -> Fleet:
    able = [host for host in hosts if host.takes_work]
    return Fleet(
        free=free_devices(able),
        total={
            "cuda": {host.name: len(host.cuda) for host in able},
            "cpu": {host.name: host.cpu_slots for host in able},
        },
    )


def _estimate(snapshot: QueueSnapshot, job_id: str) -> StartEstimate | None:
    start = snapshot.starts.get(job_id)
    if start is None or snapshot.taken_at.timestamp() + start.in_s > LATEST:  # a time limit may have any length
        return None
    return StartEstimate(at=snapshot.taken_at + timedelta(seconds=start.in_s), rests_on=tuple(sorted(start.rests_on)))
