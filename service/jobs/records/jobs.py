"""Jobs as the store gives them out, one by one, in lists and in the queue."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from service.jobs.launchers import LOCAL
from service.jobs.projects import DEFAULT_PROJECT
from service.jobs.queue.forecast import Basis
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
