"""Serves the reports of jobs."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter

from api.callers import ReadableJob, StoreDep
from api.requests import ProblemError
from service.jobs.kinds.registry import KINDS
from service.jobs.records import Job, NotFound
from service.jobs.store import Store

router = APIRouter(tags=["report"])

_MOST_BYTES = 64 << 20
"""Largest report that is served here; a larger one is only an artifact."""


@router.get("/jobs/{job_id}/report")
def get_job_report(job: ReadableJob, store: StoreDep) -> dict[str, Any]:
    """Return a job's report: every rung and the gate of a compile job, the result of a train or verify job."""
    artifact = KINDS.declaration(job.kind).report if job.kind in KINDS.provided else None
    found = job.result if artifact is None else _read_report(store, job.id, artifact)
    if found is None:
        raise ProblemError(404, _why_none(job))
    return found


def _read_report(store: Store, job_id: str, artifact: str) -> dict[str, Any] | None:
    try:
        report = json.loads(store.artifacts.read(job_id, artifact, _MOST_BYTES))
    except (NotFound, ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) else None


def _why_none(job: Job) -> str:
    if job.error is not None:
        return f"job {job.id} {job.state} without a report: {job.error.message}"
    return f"job {job.id} is {job.state}; it has no report" + ("" if job.ended_at else " yet")
