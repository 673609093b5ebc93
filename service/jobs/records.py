"""Plain data that the store gives out: jobs, placements, hosts, claims. No behaviour, no Redis."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from service.jobs.launchers import LOCAL
from service.jobs.projects import DEFAULT_PROJECT, ROLES, SCOPES, Role, Scope
from service.jobs.queue.forecast import Basis
from service.jobs.spec.base import CommonSpec
from service.jobs.states import JobState


class FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Allocation(FrozenModel):
    """Tells on what devices of a scheduler the newest attempt runs, or ran."""

    launcher: str
    id: str
    """What the scheduler calls it."""
    facts: dict[str, str] = {}
    """What the scheduler says of it, for accounting: its partition, its account, its nodes."""


class Progress(FrozenModel):
    """``done`` of ``total`` units. Where one unit takes long, ``share`` is the part of all the work that is done, finer
    than ``done / total``, ``phase`` is what the job is doing, and ``left_s`` estimates the seconds to its end.
    """

    done: int
    total: int
    unit: str
    share: float | None = None
    phase: str | None = None
    left_s: float | None = None


class JobPhase(FrozenModel):
    """Tells since when the newest attempt did what ``name`` says, and for how many ``seconds``: ``None`` while it does.

    Every job is *starting* from its placement to the first line of its ranks' own code, then *importing*, *loading*
    what its spec names and, from its first result on, *working*, then *ending*. Its kind may tell of more in between,
    such as *preparing* and *first step*.
    """

    name: str
    began_at: datetime
    seconds: float | None


class HostShare(FrozenModel):
    """Lists the devices of one host that an attempt holds; ``pool`` says which kind the indices count."""

    host: str
    devices: tuple[int, ...]
    pool: Literal["cuda", "cpu"] = "cpu"


class JobError(FrozenModel):
    type: str
    message: str
    rank: int | None = None
    traceback_artifact: str | None = None


class BestJob(FrozenModel):
    """Names the job of a sweep whose result has the best value of the metric that the sweep asks for."""

    job: str
    value: float


class SweepJobs(FrozenModel):
    """Counts the jobs of a sweep by state."""

    total: int
    queued: int = 0
    starting: int = 0
    running: int = 0
    cancelling: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    best: BestJob | None = None


class ListedJob(FrozenModel):
    """A job as a list shows it: with its spec only where that was asked for, and without its phases."""

    id: str
    kind: str
    name: str
    labels: dict[str, str]
    owner: str
    project: str = DEFAULT_PROJECT
    shared_with: tuple[str, ...] = ()
    """Other projects whose members may read the job; to those members, only their own."""
    state: JobState
    attempt: int
    priority: int
    created_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    progress: Progress | None = None
    placement: tuple[HostShare, ...] = ()
    launcher: str = LOCAL
    """What gives devices to it: ``local``, the hosts of the service, or a scheduler's launcher."""
    allocation: Allocation | None = None
    """``None`` where that is ``local``, and before the first attempt."""
    reason: str | None = None
    """Why the job is where it is, for people: what it waits for, why it was requeued."""
    parallel: dict[str, int] | None = None
    """Degrees of parallelism by dimension; ``None`` of a job that an older version accepted."""
    spec: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    error: JobError | None = None
    sweep: str | None = None
    """The parent of a job that is one of a sweep."""
    parameters: dict[str, Any] | None = None
    """The swept fields of such a job, by dotted path."""
    children: SweepJobs | None = None
    """Set for a parent, which holds no devices itself: its state follows from those of its jobs."""

    def is_visible_to(self, project: str) -> bool:
        """Return whether the members of a project may read the job."""
        return project == self.project or project in self.shared_with


class Job(ListedJob):
    """A job as the API shows it."""

    spec: dict[str, Any]
    phases: tuple[JobPhase, ...] = ()


class Accepted(FrozenModel):
    """Names a job that was submitted; ``created`` is false where its idempotency key had submitted it before."""

    id: str
    created: bool


class JobPage(FrozenModel):
    """A page of jobs, which iterating over it yields."""

    items: tuple[ListedJob, ...]
    next_cursor: str | None = None

    def __iter__(self) -> Iterator[ListedJob]:  # type: ignore[override]
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __bool__(self) -> bool:
        return True


JobOrder = Literal["newest", "active"]


class JobCounts(FrozenModel):
    """Counts jobs by state. Where it is not ``exact``, a count may be larger than it says: counting is bounded."""

    states: dict[JobState, int]
    exact: bool = True


class StartEstimate(FrozenModel):
    """Estimates when a waiting job may start, should the queue stay as it is. ``rests_on`` says how the ends of the
    jobs before it are known: by their own ``progress``, by the ``durations`` of earlier jobs of their kind, by their
    time ``limits``, which they may end long before. It is empty where nothing has to end first.
    """

    at: datetime
    rests_on: tuple[Basis, ...]


class ProjectShare(FrozenModel):
    """Tells what fair share compares a project by: the device-seconds that it used, decayed, and what it holds."""

    project: str
    weight: float
    used_s: float
    devices: int
    share: float
    """The project with the smallest share is next, among those that have jobs of equal priority."""


class QueueLine(FrozenModel):
    """Tells of one waiting job."""

    job: str
    kind: str
    name: str
    owner: str
    project: str
    priority: int
    place: int | None
    """Its position in the order of placement, among all jobs that wait for devices; 1 is next. ``None`` while it waits
    for other jobs."""
    reason: str | None
    start: StartEstimate | None
    """``None`` where nothing tells when the jobs before it end."""


class QueuePage(FrozenModel):
    """A page of the queue, whose lines iterating over it yields. ``pending`` counts all jobs that wait for devices,
    ``dependent`` those that wait for other jobs.
    """

    items: tuple[QueueLine, ...]
    pending: int
    dependent: int
    next_cursor: str | None = None

    def __iter__(self) -> Iterator[QueueLine]:  # type: ignore[override]
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __bool__(self) -> bool:
        return True


class Holding(FrozenModel):
    """Devices of a host that an attempt holds. ``lost``: the service gave the attempt up, and the host has yet to
    confirm that its processes are gone. ``job`` is ``None`` to those who may not read that job."""

    job: str | None
    attempt: int
    pool: Literal["cuda", "cpu"]
    devices: tuple[int, ...]
    lost: bool = False


class AllocatedDevices(FrozenModel):
    """Describes what one host has of an allocation: devices that a launcher got from its scheduler for one job."""

    launcher: str
    id: str
    """What the scheduler calls the allocation."""
    job: str | None
    """``None`` to those who may not read that job."""
    pool: Literal["cuda", "cpu"]
    devices: int


class FailingHost(FrozenModel):
    """Explains why a host gets no work for a while: parts that were placed there did not start."""

    reason: str
    since: datetime
    failed_starts: int
    retry_in_s: float
    """Seconds until it is tried with one part; 0 while it may be."""


class FleetCapacity(FrozenModel):
    """Counts the devices of all hosts that are heard of, drained ones among them, by pool (``cuda``, ``cpu``)."""

    devices: dict[str, int]
    auto_pool: Literal["cuda", "cpu"]
    """The pool that the device ``auto`` stands for at present (``store/lua/lib/fleet.lua``)."""


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
    """What they hold; together with ``free`` all devices."""
    failing: FailingHost | None = None
    """Set while parts that are placed here do not start; resuming the host clears it, and so does a start."""
    seen_at: datetime
    clock_skew_s: float = 0.0
    """Seconds by which its clock was ahead of the broker's when it last reported itself."""
    versions: dict[str, str]
    isolation: tuple[str, ...] = ()
    """What keeps ranks from the host and from other jobs: some of ``limits``, ``files``, ``network``, ``broker``."""
    launchers: dict[str, str] = {}
    """Launchers that its worker serves besides its own devices, and what each says of what it has."""
    allocation: AllocatedDevices | None = None
    """Set while the host is here for one job alone, on devices that a launcher got for it."""

    @property
    def takes_work(self) -> bool:
        """Return whether placement gives it jobs."""
        return self.alive and not self.draining and self.failing is None and self.allocation is None


class Artifact(FrozenModel):
    name: str
    bytes: int
    sha256: str
    media_type: str
    created_at: datetime


class StoredFile(FrozenModel):
    """An upload as the project has it that uploaded it first."""

    id: str
    sha256: str
    bytes: int
    media_type: str
    name: str = ""
    project: str = DEFAULT_PROJECT
    owner: str = ""
    created_at: datetime | None = None
    """``None`` of one that an older version took."""


class Upload(StoredFile):
    """An upload with its use. ``jobs`` are the newest of the ``job_count`` jobs that name it."""

    last_used_at: datetime | None
    expires_at: datetime | None
    """``None`` where uploads are kept, and while an unfinished job needs it (``in_use``)."""
    in_use: bool
    job_count: int
    jobs: tuple[str, ...]


class ApiKey(FrozenModel):
    """A key without its secret. ``admin`` includes ``submit``, which includes ``read``.

    A key speaks for its owner, whose name it has, in one project. Only an admin key may be of none: an operator's.
    """

    id: str
    name: str
    scopes: tuple[Scope, ...]
    project: str | None = DEFAULT_PROJECT
    created_at: datetime
    last_used_at: datetime | None = None
    expires_at: datetime | None = None
    """When it stops working, and its sessions and streams end."""
    holder: Literal["key", "person", "account"] = "key"
    """Who speaks by it: whoever was given the secret; a person who signs in through the OpenID Connect provider, for
    which there is no secret; a service account, of the key's name.
    """
    successor: str | None = None
    """Id of the key that took its place when it was rotated."""

    @property
    def is_operator(self) -> bool:
        """Return whether the key may do everything in every project, and run the service."""
        return self.project is None

    @property
    def role(self) -> Role:
        """Return what the key may do in its project, by the greatest of its scopes."""
        return ROLES[max(map(SCOPES.index, self.scopes))]


class ServiceAccount(FrozenModel):
    """A program that owns jobs: its keys do what the account may, stop together, and begin no session."""

    name: str
    scopes: tuple[Scope, ...]
    project: str | None = DEFAULT_PROJECT
    created_at: datetime
    disabled: bool = False
    keys: tuple[ApiKey, ...] = ()


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
    """Grants a supervisor its part: the spec, the devices and the lease that come with a claim."""

    ref: AttemptRef
    spec: CommonSpec
    shares: tuple[HostShare, ...]
    """All hosts of the gang; the first one leads the rendezvous."""
    leader_address: str
    lease_s: float

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


Directive = Literal["run", "stop", "lost"]
"""Answer to a renewal: go on; end the group and report (cancelled, or a peer failed); the attempt is not yours."""


@dataclass(frozen=True)
class PartOutcome:
    """Reports how one host's part of an attempt ended. One that was ``interrupted`` is to be done again; so is one that
    was ``lost`` by no fault of the job's (its supervisor was ended, or found itself unable to go on).
    """

    status: Literal["succeeded", "failed", "stopped", "interrupted", "lost"]
    result: dict[str, Any] | None = None
    error: JobError | None = None


LONGEST_TEXT = 1000
"""Characters of each text in a refusal: what was given may be of any length."""


def shortened(text: str, most: int = LONGEST_TEXT) -> str:
    """Return the text, or its first ``most`` characters and an ellipsis."""
    return text if len(text) <= most else f"{text[:most]}…"


@dataclass(frozen=True)
class Problem:
    """One reason to refuse an input: where, what, what was given and what would be accepted."""

    path: str
    message: str
    got: Any
    expected: str

    def shortened(self) -> Problem:
        """Return the problem with texts of at most :data:`LONGEST_TEXT` characters; a value that is longer as JSON
        becomes such a text.
        """
        try:
            got = json.dumps(self.got, default=str)
        except (ValueError, RecursionError):
            got = str(self.got)
        kept = self.got if len(got) <= LONGEST_TEXT else shortened(got)
        return Problem(shortened(self.path), shortened(self.message), kept, shortened(self.expected))


class Rejected(Exception):  # noqa: N818 - reads as the verdict it is
    """The input was refused; ``problems`` says why, field by field."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{problem.path}: {problem.message}" for problem in problems))
        self.problems = problems


class NotFound(Exception):  # noqa: N818
    """No such job, file, host, key or artifact."""


class Conflict(Exception):  # noqa: N818
    """The request contradicts the present state (an idempotency key reused, a running job deleted)."""


class OverQuota(Exception):  # noqa: N818
    """The project has as much as it may of something; the text says of what, how much, and by whom."""


class UnknownSpec(Exception):  # noqa: N818
    """A spec that was accepted once is not understood here: the job was claimed and can only be failed."""


class Superseded(Exception):  # noqa: N818
    """A write carried the number of an attempt that is no longer current."""


ISOLATION_PARTS = MappingProxyType(
    {
        "limits": "limits on memory, file size, open files and core dumps; no new privileges",
        "files": "ranks open the files of their own job only (Landlock)",
        "network": "a job on one host has a network of its own (namespaces)",
        "broker": "ranks do not see the broker's socket (namespaces)",
        "memory": "shared memory is a job's own, has a limit and ends with it (namespaces, Linux 6.10)",
    }
)
"""The first always holds, the others where the host allows them."""
