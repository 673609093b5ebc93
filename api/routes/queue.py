"""Serves the queue: each waiting job's place, reason and expected start; and the shares that order projects."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from api.callers import Admin, Reader, StoreDep, audit
from api.requests import Limit, PageCursor, StrictRoute
from service.jobs.accounts import ProjectName
from service.jobs.records import ProjectShare, QueuePage

router = APIRouter(tags=["queue"], route_class=StrictRoute)


class ShareList(BaseModel):
    items: list[ProjectShare]


class ProjectWeight(BaseModel, extra="forbid"):
    weight: float


@router.get("/queue")
def read_queue(
    *,
    key: Reader,
    store: StoreDep,
    job: Annotated[str | None, Query(max_length=200, description="only the line of this job")] = None,
    owner: Annotated[str | None, Query(max_length=200, description="only jobs of this owner")] = None,
    project: Annotated[ProjectName | None, Query(description="only jobs of this project")] = None,
    limit: Limit = 50,
    cursor: PageCursor = None,
) -> QueuePage:
    """List waiting jobs in the order of placement, then those that wait for other jobs. Places count every job;
    jobs that the key may not see are not listed.
    """
    if key.project is None:
        return store.queue.page(limit, cursor, job_id=job, owner=owner, project=project)
    visible = store.jobs.visible_among(key.project, [waiting.id for waiting in store.queue.snapshot().jobs])
    return store.queue.page(
        limit, cursor, job_id=job, owner=owner, project=project, may_see=lambda waiting: waiting.id in visible
    )


@router.get("/shares")
def list_shares(key: Reader, store: StoreDep) -> ShareList:
    """List what projects have used and hold; first comes the project whose jobs are next at equal priority. A
    project that is not listed has used nothing.
    """
    return ShareList(items=store.shares.list())


@router.put("/shares/{project}")
def weigh_project(
    project: ProjectName, body: ProjectWeight, request: Request, key: Admin, store: StoreDep
) -> ProjectShare:
    """Give a project a weight: one of weight 2 may use twice as much as one of weight 1, the initial weight of
    every project.
    """
    share = store.shares.weigh(store.projects.get(project).name, body.weight)
    audit(request, "project.weigh", subject=project, weight=f"{share.weight:g}")
    return share
