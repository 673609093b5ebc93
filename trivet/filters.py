"""Types what lists of jobs are filtered by, and what a deletion by filters came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from service.jobs.records import JobOrder
from service.jobs.spec.common import JobState


@dataclass(frozen=True)
class Deletions:
    """The jobs that were deleted, or would be, and why others that match stay."""

    jobs: tuple[str, ...]
    kept: Mapping[str, str]


class JobFilters(TypedDict, total=False):
    """Filters a list of jobs; ``label`` is ``key`` or ``key=value``, ``q`` part of an id, a name or a label, and
    ``sweep`` the id of a sweep, or ``none`` to leave out the jobs of all sweeps.
    """

    kind: str | None
    label: str | None
    owner: str | None
    project: str | None
    sweep: str | None
    q: str | None


class JobsWanted(JobFilters, total=False):
    """Chooses and orders a list of jobs."""

    state: JobState | Sequence[JobState] | None
    order: JobOrder | None
    include: Literal["spec"] | None
