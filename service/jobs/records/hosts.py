"""Defines hosts, the devices that jobs hold there, and the parts of attempts that run on them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from service.jobs.records.jobs import FrozenModel, HostShare, JobError
from service.jobs.spec.common import CommonSpec, Dependency


class Holding(FrozenModel):
    """Devices of a host that an attempt holds. ``lost``: the service gave the attempt up, and the host has yet to
    confirm that its processes are gone. ``job`` is ``None`` to those who may not read that job."""

    job: str | None
    attempt: int
    pool: Literal["cuda", "cpu"]
    devices: tuple[int, ...]
    lost: bool = False


class AllocatedDevices(FrozenModel):
    """Describes one host's share of an allocation: devices that a launcher got from its scheduler for one job."""

    launcher: str
    id: str
    """The scheduler's name for the allocation."""
    job: str | None
    """``None`` to those who may not read that job."""
    pool: Literal["cuda", "cpu"]
    devices: int


class FailingHost(FrozenModel):
    """The reason why a host gets no work for a while: parts placed there did not start."""

    reason: str
    since: datetime
    failed_starts: int
    retry_in_s: float
    """Seconds until it is tried with one part; 0 while it may be."""


class CoreDemand(FrozenModel):
    """Threads that wanted to compute on a host at one moment."""

    job: str | None
    """``None`` for processes of no job, and to those who may not read it."""
    program: str
    """Name and user of a program that is of no job; else empty."""
    threads: int
    """Threads that ran or waited for a core at that moment."""


class Overcommitment(FrozenModel):
    """More threads want to compute on a host than it has cores."""

    load: float
    """Threads that ran or waited for a core, on average over the last minute."""
    cores: int
    """Cores of the machine."""
    by: tuple[CoreDemand, ...]
    """Who has most of them."""

    def __str__(self) -> str:
        users = ", ".join(f"{one.job or one.program or 'another job'} {one.threads}" for one in self.by)
        now = f"; now {users}" if users else ""
        return f"{self.load:g} threads on average compete for its {self.cores} cores{now}"


class FleetCapacity(FrozenModel):
    """The devices of all hosts that report, including drained ones, by pool (``cuda``, ``cpu``)."""

    devices: dict[str, int]
    auto_pool: Literal["cuda", "cpu"]
    """The present pool of the device ``auto`` (``store/lua/lib/fleet.lua``)."""
    packages: frozenset[str] = frozenset()
    """The packages whose versions one of them reports."""


class Host(FrozenModel):
    """A worker host as it last reported itself."""

    name: str
    alive: bool
    draining: bool
    address: str
    cuda: tuple[str, ...]
    """Device names by CUDA index; empty on a host without GPUs."""
    cpu_slots: int
    free: dict[str, tuple[int, ...]]
    """Free device indices by pool (``cuda``, ``cpu``)."""
    running: tuple[str, ...]
    """Ids of the jobs that hold devices here: parts that start, run, or are lost and not yet confirmed as gone."""
    held: tuple[Holding, ...] = ()
    """The devices that they hold; together with ``free``, all devices."""
    failing: FailingHost | None = None
    """Set while parts that are placed here do not start; resuming the host clears it, and so does a start."""
    overcommitted: Overcommitment | None = None
    """Set while far more threads want to compute there than it has cores."""
    seen_at: datetime
    clock_skew_s: float = 0.0
    """Seconds by which its clock was ahead of the broker's when it last reported itself."""
    versions: dict[str, str]
    isolation: tuple[str, ...] = ()
    """The measures that keep ranks from the host and from other jobs: some of ``limits``, ``files``, ``network``,
    ``broker``.
    """
    launchers: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """Launchers that its worker serves besides its own devices, with each one's report of its resources."""
    allocation: AllocatedDevices | None = None
    """Set while the host is here for one job alone, on devices that a launcher got for it."""

    @property
    def state(self) -> Literal["lost", "draining", "failing", "alive"]:
        """Return the host's state in one word, as lists and metrics have it."""
        if not self.alive:
            return "lost"
        return "draining" if self.draining else "failing" if self.failing else "alive"

    @property
    def takes_work(self) -> bool:
        """Return whether placement gives it jobs."""
        return self.alive and not self.draining and self.failing is None and self.allocation is None


@dataclass(frozen=True)
class AttemptRef:
    """One host's part of one attempt. ``attempt`` is the fencing token of every write."""

    job_id: str
    attempt: int
    host: str

    def __str__(self) -> str:
        return f"{self.job_id}:{self.attempt}:{self.host}"


@dataclass(frozen=True)
class Claim:
    """A supervisor's claimed part: its spec, devices and lease."""

    ref: AttemptRef
    spec: CommonSpec
    shares: tuple[HostShare, ...]
    """All hosts of the gang; the first one leads the rendezvous."""
    leader_address: str
    lease_s: float
    files: tuple[str, ...] = ()
    """The uploads that its submission named: it was checked for these, so its ranks get these and no others."""
    needed: frozenset[str] = frozenset()
    """The jobs that its submission named."""

    @property
    def sources(self) -> tuple[Dependency, ...]:
        """Return the named jobs whose files its ranks may read."""
        named = (each for each in self.spec.dependencies() if each.kind is not None)
        return tuple(each for each in named if each.job_id in self.needed)

    @property
    def share(self) -> HostShare:
        return next(share for share in self.shares if share.host == self.ref.host)

    @property
    def leads(self) -> bool:
        """Return whether this host leads the rendezvous, and runs rank 0."""
        return self.shares[0].host == self.ref.host

    @property
    def ranks(self) -> range:
        """Return the ranks of the attempt that run on this host."""
        before = itertools.takewhile(lambda share: share.host != self.ref.host, self.shares)
        first = sum(len(share.devices) for share in before)
        return range(first, first + len(self.share.devices))


@dataclass(frozen=True)
class EndEarly:
    """Answer to a renewal: let the ranks end the job early, as a success; its sweep stops it for this reason."""

    reason: str


Directive = Literal["run", "stop", "lost"] | EndEarly
"""Answer to a renewal: go on; end the group and report (cancelled, or a peer failed); the attempt is not yours."""


@dataclass(frozen=True)
class PartOutcome:
    """How one host's part of an attempt ended. An ``interrupted`` part must be done again, and so must one that
    was ``lost`` by no fault of the job (its supervisor was ended, or could not go on).
    """

    status: Literal["succeeded", "failed", "stopped", "interrupted", "lost"]
    result: dict[str, Any] | None = None
    error: JobError | None = None
