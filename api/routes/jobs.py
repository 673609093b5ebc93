"""Jobs: submit, look up, cancel, retry, delete."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response, status
from starlette.concurrency import run_in_threadpool

from api import sse
from api.checker import Checker, while_connected
from api.context import CheckerDep, HubDep, StoreDep
from api.params import Limit, PageCursor, refuse
from api.security import Reader, Submitter, require_owner
from service.jobs.kinds.registry import JobSpec, KindName
from service.jobs.plugins import CommonSpec
from service.jobs.records import Conflict, Job, JobPage, Rejected
from service.jobs.states import JobState
from service.jobs.store import JobFilter, Store

router = APIRouter(tags=["jobs"])

_IdempotencyKey = Annotated[
    str | None,
    Header(min_length=1, max_length=200, description="the same key and body again give the same job, for a day"),
]


@router.post(
    "/jobs",
    status_code=status.HTTP_201_CREATED,
    response_model=Job,
    responses={200: {"model": Job, "description": "the job that this idempotency key already submitted"}},
)
async def submit_job(
    *,
    body: JobSpec,
    request: Request,
    response: Response,
    key: Submitter,
    store: StoreDep,
    checker: CheckerDep,
    idempotency_key: _IdempotencyKey = None,
) -> Job:
    """Submit a job. When the answer is 201 the job survives any crash."""
    try:
        job, created = await _submit(body, key.name, idempotency_key, store=store, checker=checker, request=request)
    except Conflict as conflict:
        if idempotency_key is None:
            raise
        raise refuse(
            "Idempotency-Key", str(conflict), idempotency_key, "a new key, or the body it was first used with"
        ) from conflict
    response.headers["Location"] = str(request.app.url_path_for("get_job", job_id=job.id))
    if not created:
        response.status_code = status.HTTP_200_OK
    return job


async def _submit(
    spec: CommonSpec, owner: str, idempotency_key: str | None, *, store: Store, checker: Checker, request: Request
) -> tuple[Job, bool]:
    """Submit a spec; return the job, and whether it is new. No thread waits while the spec is checked, and a client
    that leaves ends the check.
    """
    submission = await run_in_threadpool(store.jobs.submission, spec, owner, idempotency_key)
    if (known := await run_in_threadpool(store.jobs.known, submission)) is not None:
        return known, False
    asked = await run_in_threadpool(store.jobs.check_request, spec)
    if problems := await while_connected(request, checker.problems(asked, owner)):
        raise Rejected(problems)
    return await run_in_threadpool(store.jobs.accept, submission)


@router.get("/jobs")
def list_jobs(
    *,
    key: Reader,
    store: StoreDep,
    kind: KindName | None = None,
    state: JobState | None = None,
    label: Annotated[str | None, Query(max_length=200, description="`key=value`, or `key` with any value")] = None,
    owner: Annotated[str | None, Query(max_length=200)] = None,
    q: Annotated[str | None, Query(max_length=200, description="part of a name or of an id")] = None,
    include: Annotated[Literal["spec"] | None, Query(description="`spec`: with the spec of every job")] = None,
    limit: Limit = 50,
    cursor: PageCursor = None,
) -> JobPage:
    """List jobs, newest first, without their specs unless they are asked for. A page of long records has fewer than
    ``limit`` jobs.
    """
    wanted = JobFilter(kind=kind, state=state, label=label, owner=owner, q=q)
    return store.jobs.list(wanted, limit=limit, cursor=cursor, specs=include == "spec")


@router.get("/jobs/{job_id}")
async def get_job(
    *,
    job_id: str,
    key: Reader,
    store: StoreDep,
    hub: HubDep,
    wait_s: Annotated[float, Query(ge=0, description="wait until the job is over, 60 s at most")] = 0.0,
) -> Job:
    """Return one job; with ``wait_s``, once it is over or the time is."""
    if wait_s == 0:
        return await run_in_threadpool(store.jobs.get, job_id)
    return await sse.wait_terminal(hub, store, job_id, min(wait_s, 60.0), key)


@router.post("/jobs/{job_id}/cancel", status_code=status.HTTP_202_ACCEPTED)
def cancel_job(job_id: str, key: Submitter, store: StoreDep) -> Job:
    """Cancel: at once while it is queued; a running job is asked to end, then ended."""
    require_owner(key, store.jobs.get(job_id))
    return store.jobs.cancel(job_id)


@router.post("/jobs/{job_id}/retry", status_code=status.HTTP_202_ACCEPTED)
def retry_job(job_id: str, key: Submitter, store: StoreDep) -> Job:
    """Queue a failed or cancelled job again, as a new attempt that resumes from the last checkpoint."""
    require_owner(key, store.jobs.get(job_id))
    return store.jobs.retry(job_id)


@router.delete("/jobs/{job_id}", status_code=status.HTTP_204_NO_CONTENT)
def delete_job(job_id: str, key: Submitter, store: StoreDep) -> None:
    """Delete a job that is over, its events and its artifacts."""
    require_owner(key, store.jobs.get(job_id))
    store.jobs.delete(job_id)
