"""Serves the deletion of ended jobs that match a filter, some at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from api.callers import StoreDep, Submitter, audit, why_unchangeable
from api.requests import FieldError, Moment, PageCursor, StrictRoute, invalid
from api.routes.jobs import Filter
from service.jobs.records import ApiKey, Conflict, ListedJob, NotFound
from service.jobs.spec.common import TERMINAL
from service.jobs.store import Store
from service.jobs.store.listing import NO_SWEEP

EndState = Literal["succeeded", "failed", "cancelled"]
router = APIRouter(tags=["jobs"], route_class=StrictRoute)


class KeptJob(BaseModel):
    """A job that matches and stays, and why."""

    job: str = Field(description="its id")
    why: str = Field(description="why it stays")


class DeletedJobs(BaseModel):
    """The jobs that one call deleted, or would delete; those of a sweep go with it and are not named."""

    jobs: list[str] = Field(description="the ids of those that were deleted, or would be")
    kept: list[KeptJob] = Field(description="those that match and stay")
    next_cursor: str | None = Field(description="leads to further jobs; null when all that match were looked at")


@router.post("/jobs:delete")
def delete_jobs(
    *,
    request: Request,
    key: Submitter,
    store: StoreDep,
    wanted: Filter,
    state: Annotated[list[EndState] | None, Query(description="jobs that ended in any of these states")] = None,
    ended_before: Annotated[Moment | None, Query(description="jobs that ended before this time")] = None,
    dry_run: Annotated[bool, Query(description="only say which jobs would be deleted, and which would stay")] = False,
    limit: Annotated[int, Query(ge=1, le=100, description="most jobs that one call looks at")] = 100,
    cursor: PageCursor = None,
) -> DeletedJobs:
    """Delete ended jobs that match all of a list's filters, newest first, with their events and artifacts; at
    least one filter is needed. Of sweeps, those that match as a whole. What an unfinished job needs, and what the key
    may not change, stays.
    """
    if not (wanted.chooses or state or ended_before):
        expected = "a filter of GET /v1/jobs, state or ended_before; all three states for every ended job"
        raise invalid([FieldError(path="", message="this would delete every job", got=None, expected=expected)])
    chosen = replace(wanted, states=tuple(state or sorted(TERMINAL)), sweep=wanted.sweep or NO_SWEEP)
    page = store.listing.newest(chosen, limit, cursor, specs=False)
    gone: list[str] = []
    kept: list[KeptJob] = []
    for job in page.items:
        if ended_before is not None and (job.ended_at is None or job.ended_at >= ended_before):
            continue
        if (why := _refusal(store, key, job, dry_run=dry_run)) is not None:
            kept.append(KeptJob(job=job.id, why=why))
            continue
        gone.append(job.id)
        if not dry_run:
            audit(request, "job.delete", job=job.id, owner=job.owner, name=job.name)
    return DeletedJobs(jobs=gone, kept=kept, next_cursor=page.next_cursor)


def _refusal(store: Store, key: ApiKey, job: ListedJob, *, dry_run: bool) -> str | None:
    """Delete a job, or find out whether it can be deleted; return why it stays."""
    if (why := why_unchangeable(key, job)) is not None:
        return why
    try:
        (store.jobs.check_deletion if dry_run else store.jobs.delete)(job.id)
    except (Conflict, NotFound) as error:
        return str(error)
    return None
