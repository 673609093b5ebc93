"""Submits batches: many jobs by one request, all or none."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, status
from pydantic import AfterValidator, Field
from starlette.concurrency import run_in_threadpool

from api.callers import Submitting, audit_submissions
from api.offload import while_connected
from api.requests import StrictRoute, refused_key
from service.jobs.kinds.registry import JobSpec
from service.jobs.records import Accepted, Conflict, FrozenModel, Rejected
from service.jobs.spec.common import CommonSpec, FewErrors, disagreement

router = APIRouter(tags=["jobs"], route_class=StrictRoute)

MOST_JOBS = 1000


def _for_itself(spec: CommonSpec) -> CommonSpec:
    if spec.sweep is not None:
        raise disagreement("sweep", "a sweep is submitted by itself", None, "none in a batch")
    if spec.stands_for_others:
        raise disagreement("kind", f"a {spec.kind} is submitted by itself", spec.kind, "none in a batch")
    return spec


class Batch(FewErrors):
    """Specs to submit together."""

    jobs: Annotated[list[Annotated[JobSpec, AfterValidator(_for_itself)]], Field(min_length=1, max_length=MOST_JOBS)]


class AcceptedBatch(FrozenModel):
    """The jobs of a batch, in the order of their specs."""

    items: tuple[Accepted, ...]


@router.post(
    "/jobs:batch",
    status_code=status.HTTP_201_CREATED,
    response_model=AcceptedBatch,
    responses={200: {"model": AcceptedBatch, "description": "this idempotency key had submitted all of them before"}},
)
async def submit_batch(body: Batch, call: Submitting) -> AcceptedBatch:
    """Submit up to 1,000 jobs, all or none. If one is refused, nothing is submitted, and `errors` names every
    field, such as `jobs.3.steps`. Afterwards the jobs are independent.
    """
    project, key, jobs, checker = call.project, call.key, call.context.store.jobs, call.context.checker
    submissions = await run_in_threadpool(jobs.batch, body.jobs, key.name, call.idempotency_key, project=project)
    try:
        unknown = await run_in_threadpool(jobs.unknown, submissions)
        if unknown:
            asked = await run_in_threadpool(jobs.check_request, unknown)
            if problems := await while_connected(call.request, checker.problems(asked, key.owner)):
                raise Rejected(problems)
        items = await run_in_threadpool(jobs.accept_all, submissions)
    except Conflict as conflict:
        raise refused_key(conflict, call.idempotency_key) from conflict
    if created := [item.id for item in items if item.created]:
        await audit_submissions(call.request, created, project=project)
    else:
        call.response.status_code = status.HTTP_200_OK
    return AcceptedBatch(items=items)
