"""What a training job's pipeline was planned to do."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import ValidationError

from api.context import StoreDep
from api.problems import ProblemError
from api.security import Reader
from service.jobs.plan import Plan, plan
from service.jobs.records import Job
from service.jobs.spec import TrainSpec, spec_adapter

router = APIRouter(tags=["schedule"])


@router.get("/jobs/{job_id}/schedule")
def job_schedule(job_id: str, key: Reader, store: StoreDep) -> Plan:
    """The schedule of one step of a pipeline, with its predicted times and costs, in units of one forward."""
    job = store.jobs.get(job_id)
    try:
        spec = spec_adapter.validate_python(job.spec)
    except ValidationError as error:  # a package that it needs may be gone since it was submitted
        raise ProblemError(409, f"the spec of job {job.id} cannot be read: {error.errors()[0]['msg']}") from error
    found = plan(spec) if isinstance(spec, TrainSpec) else None
    if found is None:
        raise ProblemError(404, _why_none(job))
    return found


def _why_none(job: Job) -> str:
    if job.kind != "train":
        return f"job {job.id} is a {job.kind} job; only training jobs have a pipeline"
    return f"job {job.id} has no pipeline: its parallel.pp is 1"
