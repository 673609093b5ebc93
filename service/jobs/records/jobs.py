"""Defines jobs as the store returns them: single, in lists and in the queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from service.jobs.accounts import DEFAULT_PROJECT
from service.jobs.queue.forecast import Basis
from service.jobs.spec.common import LOCAL, JobState
from service.torch_internals.releases import is_tried

Item = TypeVar("Item")


class FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Allocation(FrozenModel):
    """The scheduler's allocation on which the newest attempt runs, or ran."""

    launcher: str
    id: str
    """The scheduler's name for it."""
    facts: dict[str, str] = {}
    """The scheduler's data about it, for accounting: partition, account, nodes."""


class Progress(FrozenModel):
    """``done`` of ``total`` units. If one unit takes long, ``share`` is the finished part of all the work,
    finer than ``done / total``. ``phase`` is the job's present activity, and ``left_s`` estimates the seconds
    to its end.
    """

    done: int
    total: int
    unit: str
    share: float | None = None
    phase: str | None = None
    left_s: float | None = None


class JobPhase(FrozenModel):
    """A phase of the newest attempt: when it began, and how many ``seconds`` it lasted, ``None`` while it lasts.

    Every job is *starting* from its placement to the first line of its ranks' own code, then *importing*, then
    *loading* its spec's models and data, from its first result on *working*, then *ending*. Its kind may add
    more in between, such as *preparing* and *first step*.
    """

    name: str
    began_at: datetime
    seconds: float | None


class TorchUsed(FrozenModel):
    """A version of torch, and whether this Trivet was tried with its release."""

    version: str
    tried: bool

    @classmethod
    def of(cls, versions: Mapping[str, str]) -> Self | None:
        """Return the torch among the ``versions`` that a host reports; ``None`` if it reports none."""
        version = versions.get("torch")
        return None if version is None else cls(version=version, tried=is_tried(version))


class ComputedBy(FrozenModel):
    """What computed an attempt: the host that led it, as it had last reported itself when the attempt was placed."""

    attempt: int
    host: str
    pool: Literal["cuda", "cpu"] = "cpu"
    devices: tuple[str, ...] = ()
    """Names of the GPUs there."""
    threads: int | None = None
    """Threads of each rank; ``None`` if the host did not say."""
    versions: dict[str, str] = {}
    """Versions of Trivet, torch, the CUDA that torch is built for, Python, and packages of models."""

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        devices = ", ".join(self.devices) or self.pool
        threads = "" if self.threads is None else f", threads {self.threads}"
        return f"{self.host}, {devices}{threads}, {versions}"

    def facts(self) -> dict[str, str | int | None]:
        """Return the versions, then host, devices and threads, by name."""
        told = {"host": self.host, "devices": ", ".join(self.devices) or self.pool, "threads": self.threads}
        return {**self.versions, **told}


class HostShare(FrozenModel):
    """The devices of one host that an attempt holds; ``pool`` is the kind that the indices count."""

    host: str
    devices: tuple[int, ...]
    pool: Literal["cuda", "cpu"] = "cpu"


class JobError(FrozenModel):
    type: str
    message: str
    rank: int | None = None
    traceback_artifact: str | None = None
    final: bool = False

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


class BestJob(FrozenModel):
    """The job of a sweep whose result has the best value of the sweep's metric."""

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
    """A job in a list: with its spec only if requested, and without its phases and torch."""

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
    """The source of its devices: ``local``, the hosts of the service, or a scheduler's launcher."""
    allocation: Allocation | None = None
    """``None`` for ``local``, and before the first attempt."""
    computed_by: tuple[ComputedBy, ...] = ()
    """What computed each attempt, the newest last; of many attempts, the last 16."""
    reason: str | None = None
    """The reason for its state, for people: what it waits for, why it was requeued."""
    parallel: dict[str, int] | None = None
    """Degrees of parallelism by dimension; ``None`` for a job that an older version accepted."""
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
    torch: TorchUsed | None = None
    """The torch of the host that leads the newest attempt; ``None`` before the first."""


class Accepted(FrozenModel):
    """A submitted job; ``created`` is false if its idempotency key had submitted it before."""

    id: str
    created: bool


class _ItemPage(FrozenModel, Generic[Item]):
    items: tuple[Item, ...]

    def __iter__(self) -> Iterator[Item]:  # type: ignore[override]
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __bool__(self) -> bool:
        return True


class JobPage(_ItemPage[ListedJob]):
    """A page of jobs; iterating yields the jobs."""

    next_cursor: str | None = None


JobOrder = Literal["newest", "active"]


class JobCounts(FrozenModel):
    """Numbers of jobs by state. If not ``exact``, the true numbers may be larger: counting is bounded."""

    states: dict[JobState, int]
    exact: bool = True


class StartEstimate(FrozenModel):
    """The estimated start of a waiting job if the queue stays as it is. ``rests_on`` says how the ends of the
    jobs before it are known: by their own ``progress``, by the ``durations`` of earlier jobs of their kind, or
    by their time ``limits``, long before which they may end. It is empty if nothing has to end first.
    """

    at: datetime
    rests_on: tuple[Basis, ...]


class ProjectShare(FrozenModel):
    """A project's standing in fair share: its decayed device-seconds, and the devices that it holds."""

    project: str
    weight: float
    used_s: float
    devices: int
    share: float
    """Its share; among projects with jobs of equal priority, the smallest share is next."""


class QueueLine(FrozenModel):
    """The line of one waiting job."""

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
    """``None`` if the ends of the jobs before it are unknown."""


class QueuePage(_ItemPage[QueueLine]):
    """A page of the queue; iterating yields its lines. ``pending`` counts all jobs that wait for devices,
    ``dependent`` those that wait for other jobs.
    """

    pending: int
    dependent: int
    next_cursor: str | None = None
