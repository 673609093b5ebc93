"""Submits batches: many jobs by one request, all or none."""

from __future__ import annotations

from typing import Annotated, Any, Self

from fastapi import APIRouter, Request, Response, status
from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, model_validator
from starlette.concurrency import run_in_threadpool

from api.callers import CheckerDep, StoreDep, Submitter, audit_submissions, target_project
from api.offload import while_connected
from api.requests import IdempotencyKey, StrictRoute, TargetProject, refused_key
from service.jobs.kinds.registry import JobSpec
from service.jobs.records import Accepted, Conflict, FrozenModel, Rejected
from service.jobs.spec.common import CommonSpec, Strict, disagreement, with_few_errors

router = APIRouter(tags=["jobs"], route_class=StrictRoute)

MOST_JOBS = 1000


def _for_itself(spec: CommonSpec) -> CommonSpec:
    if spec.sweep is not None:
        raise disagreement("sweep", "a sweep is submitted by itself", None, "none in a batch")
    if spec.stands_for_others:
        raise disagreement("kind", f"a {spec.kind} is submitted by itself", spec.kind, "none in a batch")
    return spec


class Batch(Strict):
    """Specs to submit together."""

    jobs: Annotated[list[Annotated[JobSpec, AfterValidator(_for_itself)]], Field(min_length=1, max_length=MOST_JOBS)]

    @model_validator(mode="wrap")
    @classmethod
    def _with_few_errors(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        return with_few_errors(value, validate)


class AcceptedBatch(FrozenModel):
    """The jobs of a batch, in the order of their specs."""

    items: tuple[Accepted, ...]


@router.post(
    "/jobs:batch",
    status_code=status.HTTP_201_CREATED,
    response_model=AcceptedBatch,
    responses={200: {"model": AcceptedBatch, "description": "this idempotency key had submitted all of them before"}},
)
async def submit_batch(
    *,
    body: Batch,
    request: Request,
    response: Response,
    key: Submitter,
    store: StoreDep,
    checker: CheckerDep,
    idempotency_key: IdempotencyKey = None,
    project: TargetProject = None,
) -> AcceptedBatch:
    """Submit up to 1,000 jobs, all or none. If one is refused, nothing is submitted, and `errors` names every
    field, such as `jobs.3.steps`. Afterwards the jobs are independent.
    """
    chosen = target_project(key, project)
    submissions = await run_in_threadpool(store.jobs.batch, body.jobs, key.name, idempotency_key, project=chosen)
    try:
        unknown = await run_in_threadpool(store.jobs.unknown, submissions)
        if unknown:
            asked = await run_in_threadpool(store.jobs.check_request, unknown)
            if problems := await while_connected(request, checker.problems(asked, key.owner)):
                raise Rejected(problems)
        items = await run_in_threadpool(store.jobs.accept_all, submissions)
    except Conflict as conflict:
        raise refused_key(conflict, idempotency_key) from conflict
    if created := [item.id for item in items if item.created]:
        await audit_submissions(request, created, project=chosen)
    else:
        response.status_code = status.HTTP_200_OK
    return AcceptedBatch(items=items)
