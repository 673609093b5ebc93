"""Asks launchers for devices for pending jobs, and takes back devices that no job needs.

The scheduler keeps the requests, and the store keeps the demands. Each look compares the two, so a worker may end
between any two calls. One worker at a time does so for a launcher; requests that two workers made by mistake are
taken back.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from service.jobs.files import DataLayout, remove_tree
from service.jobs.spec.common import TERMINAL
from service.jobs.store import KnownJob, PendingLaunch, Store
from workers.launchers import AllocationRequest, Booking, Launcher, LauncherUnavailable

PROGRAM = "workers.agent.allocated_host"
_HOLD_S = 15.0
_DESCRIBED_S = 15.0
_LOGS_KEPT_S, _FOLDERS_KEPT_S = 7 * 86_400.0, 86_400.0
_AT_ONCE = 20
"""Most requests in one look, since allocations are not compared meanwhile."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_REPORT_S = 30.0
"""Seconds that hosts have to leave an allocation once its attempt has ended, beyond the grace of ranks."""

logger = logging.getLogger(__name__)


@dataclass
class Tries:
    """Remembers failed requests: the pause before each further one grows."""

    made: int = 0
    next_at: float = 0.0
    said: str = ""


@dataclass(frozen=True)
class BookingPlan:
    """Lists the requests to make and the allocations to take back."""

    request: Sequence[PendingLaunch]
    cancel: Sequence[Booking]
    reasons: Mapping[str, str]
    """Why jobs wait, by id."""


@dataclass
class Planner:
    """Compares demands and allocations; remembers since when an allocation is useless, and which requests failed.

    An allocation is useful to the attempt that runs on it, and to a pending job that has not run on it, unless
    nothing begins there within ``starts_within_s`` of getting devices. A useless allocation without devices is taken
    back at once. One with devices is taken back after ``patience_s``, since its hosts leave by themselves. One that
    lasts twice as long, for example on a node that never reports the end of a Slurm job, delays no other job.
    """

    launcher: str
    patience_s: float
    starts_within_s: float = Launcher.starts_within_s
    idle_since: dict[str, float] = field(default_factory=dict)
    useless_since: dict[str, float] = field(default_factory=dict)
    tries: dict[str, Tries] = field(default_factory=dict)

    def plan(
        self,
        pending: Sequence[PendingLaunch],
        known: Mapping[str, KnownJob],
        allocations: Sequence[Booking],
        now: float,
    ) -> BookingPlan:
        """Return the requests and cancellations at ``now``, in monotonic seconds. ``known`` has every job of the
        allocations.
        """
        useful, useless = self._sort_by_use(known, allocations, now)
        held = {one.job_id for one in allocations if now - self.useless_since.get(one.id, now) < 2 * self.patience_s}
        wanted = [job for job in pending if job.job_id not in held]
        queued = {job.job_id for job in pending} | {job_id for job_id, job in known.items() if job.state == "queued"}
        self.tries = {job_id: tries for job_id, tries in self.tries.items() if job_id in queued}
        reasons = {one.job_id: one.reason for one in useful.values() if one.is_waiting and one.reason}
        reasons |= {job.job_id: self.tries[job.job_id].said for job in wanted if job.job_id in self.tries}
        return BookingPlan(
            request=[job for job in wanted if self._is_due(job.job_id, now)][:_AT_ONCE],
            cancel=[one for one in useless if one.is_waiting or now - self.useless_since[one.id] >= self.patience_s],
            reasons={job_id: said for job_id, said in reasons.items() if said},
        )

    def _sort_by_use(
        self, known: Mapping[str, KnownJob], allocations: Sequence[Booking], now: float
    ) -> tuple[dict[str, Booking], list[Booking]]:
        """Return a useful allocation of each job that has one, and all useless ones; note since when they are."""
        useful = dict[str, Booking]()
        useless = list[Booking]()
        idle = [one.id for one in allocations if not one.is_waiting and _is_queued(known.get(one.job_id))]
        self.idle_since = {name: self.idle_since.get(name, now) for name in idle}
        for allocation in sorted(allocations, key=lambda one: (one.is_waiting, one.id)):
            is_late = now - self.idle_since.get(allocation.id, now) >= self.starts_within_s
            if allocation.job_id not in useful and not is_late and _is_of_use(allocation, known.get(allocation.job_id)):
                useful[allocation.job_id] = allocation
            else:
                useless.append(allocation)
        self.useless_since = {one.id: self.useless_since.get(one.id, now) for one in useless}
        return useful, useless

    def requested(self, job_id: str, now: float, said: str = "") -> None:
        """Note a request, and the scheduler's words if it refused."""
        tries = self.tries.setdefault(job_id, Tries())
        tries.made += 1
        tries.next_at = now + min(_FIRST_PAUSE_S * 2.0 ** (tries.made - 1), _LONGEST_PAUSE_S)
        tries.said = said or f"{self.launcher} gave devices, but nothing started there; asking again"

    def _is_due(self, job_id: str, now: float) -> bool:
        return job_id not in self.tries or now >= self.tries[job_id].next_at


def _is_of_use(allocation: Booking, job: KnownJob | None) -> bool:
    if allocation.is_given_up or job is None or not job.state or job.state in TERMINAL:
        return False
    has_run_there = job.allocation == allocation.id
    return not has_run_there if job.state == "queued" else has_run_there


def _is_queued(job: KnownJob | None) -> bool:
    return job is not None and job.state == "queued"


class LauncherDesk:
    """Serves one launcher."""

    def __init__(
        self, name: str, launcher: Launcher, store: Store, worker: str, *, folder: Path, supervisor: Sequence[str]
    ) -> None:
        self.name, self._launcher, self._store, self._worker = name, launcher, store, worker
        self._supervisor = supervisor
        patience_s = launcher.context.stop_grace_s + _REPORT_S
        self._planner = Planner(name, patience_s, launcher.starts_within_s)
        self._folder, self._settings = folder, folder / "settings.json"
        self._described_at = float("-inf")
        self.description = "not asked yet"
        self._outage = ""
        self._taken_back = frozenset[str]()

    def tend(self) -> None:
        """Compare once, and act on it, unless another worker does."""
        self._describe(time.monotonic())
        if not self._store.launching.hold(self.name, self._worker, _HOLD_S):
            return
        try:
            allocations = self._launcher.allocations()
            pending, known = self._store.launching.read(self.name, [one.job_id for one in allocations])
        except LauncherUnavailable as error:
            self._note_outage(str(error))
            return
        plan = self._planner.plan(pending, known, allocations, time.monotonic())
        self._note_outage(self._take_back(plan.cancel))
        reasons = dict(plan.reasons)
        for job in plan.request:
            reasons[job.job_id] = self._request(job, time.monotonic())
        self._store.launching.tell(self.name, reasons)

    def delete_leftovers(self, data: DataLayout) -> None:
        """Delete old output of hosts of allocations, and the folders of those that were killed."""
        for path in self._folder.glob("*.log"):
            if time.time() - path.stat().st_mtime > _LOGS_KEPT_S:
                path.unlink(missing_ok=True)
        known = {host.name for host in self._store.hosts.list()}
        for folder in data.hosts.glob(f"{self.name}-*"):
            is_of_worker = (folder / "heartbeat").exists()
            with contextlib.suppress(FileNotFoundError):  # a host has just removed its own
                is_old = time.time() - folder.stat().st_mtime > _FOLDERS_KEPT_S
                if folder.name not in known and not is_of_worker and is_old:
                    remove_tree(folder)

    def _take_back(self, allocations: Sequence[Booking]) -> str:
        """Cancel useless allocations; return the scheduler's words if it did not. That delays no other job."""
        for one in allocations:
            if one.id not in self._taken_back:
                logger.info("taking back %s of %s: %s", one.id, one.job_id, one.reason or "it has devices")
        self._taken_back = frozenset(one.id for one in allocations)
        try:
            self._launcher.cancel(allocations)
        except LauncherUnavailable as error:
            return str(error)
        return ""

    def _request(self, job: PendingLaunch, now: float) -> str:
        """Ask for a job's devices; return why it still waits."""
        program = (sys.executable, "-P", "-m", PROGRAM)
        command = (*program, self.name, str(self._settings), job.job_id, *self._supervisor)
        try:
            given = self._launcher.request(AllocationRequest(**vars(job), command=command))
        except LauncherUnavailable as error:
            self._planner.requested(job.job_id, now, f"{self.name} refused it: {error}")
            return f"{self.name} refused it: {error}"
        self._planner.requested(job.job_id, now)
        logger.info("asked %s for devices of %s: %s", self.name, job.job_id, given)
        return f"waits for {self.name}, which calls it {given}"

    def _describe(self, now: float) -> None:
        if now - self._described_at < _DESCRIBED_S:
            return
        self._described_at = now
        try:
            self.description = self._launcher.describe()
        except LauncherUnavailable as error:
            self.description = f"does not answer: {error}"

    def _note_outage(self, said: str) -> None:
        if said and said != self._outage:
            logger.warning("launcher %s does not answer; asking again: %s", self.name, said)
        elif self._outage and not said:
            logger.info("launcher %s answers again", self.name)
        self._outage = said


def service_of(data: DataLayout) -> str:
    """Return the mark that tells a service's allocations from those of others."""
    return sha256(str(data.root).encode()).hexdigest()[:16]
