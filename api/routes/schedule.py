"""Serves the planned schedule of a training's pipeline."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import ValidationError

from api.callers import CheckerDep, ReadableJob, Reader
from api.offload import while_connected
from api.requests import ProblemError, StrictRoute
from service.jobs.kinds.registry import spec_adapter
from service.jobs.records import Job
from service.jobs.spec.train import TrainSpec
from service.jobs.submission.plan import Plan
from service.jobs.submission.request import PlanRequest

router = APIRouter(tags=["schedule"], route_class=StrictRoute)


def _plan_request(job: ReadableJob) -> PlanRequest:
    """Return the planning request for a job with a pipeline; refuse any other job."""
    try:
        spec = spec_adapter.validate_python(job.spec)
    except ValidationError as error:  # a package that it needs may have been removed since
        raise ProblemError(409, f"the spec of job {job.id} cannot be read: {error.errors()[0]['msg']}") from error
    if not isinstance(spec, TrainSpec) or spec.program is not None or spec.parallel.pp == 1:
        raise ProblemError(404, _why_none(job))
    return PlanRequest(spec=spec.model_dump_json(by_alias=True))


@router.get("/jobs/{job_id}/schedule", response_model=Plan)
async def get_job_schedule(
    plan_request: Annotated[PlanRequest, Depends(_plan_request)], key: Reader, checker: CheckerDep, request: Request
) -> Response:
    """Return the schedule of one step of a pipeline, with its predicted times and costs, in units of one forward."""
    plan = await while_connected(request, checker.answer(plan_request, key.owner))
    return Response(plan, media_type="application/json")


def _why_none(job: Job) -> str:
    if job.kind != "train":
        return f"job {job.id} is a {job.kind} job; only training jobs have a pipeline"
    if job.spec.get("program") is not None:
        return f"job {job.id} trains a program, which schedules its steps itself"
    return f"job {job.id} has no pipeline: its parallel.pp is 1"
