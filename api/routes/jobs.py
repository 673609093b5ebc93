"""Serves jobs: submit, look up, cancel, retry, delete."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, status
from starlette.concurrency import run_in_threadpool

from api.callers import (
    ChangeableJob,
    HubDep,
    ReadableJob,
    Reader,
    StoreDep,
    Submitting,
    as_seen,
    audit,
    audit_submissions,
    context_of,
)
from api.offload import Checker, while_connected
from api.requests import (
    FieldError,
    JobIds,
    Limit,
    NeedsFilter,
    PageCursor,
    StrictRoute,
    SweepFilter,
    invalid,
    refused_key,
    several_of,
    split_names,
)
from api.server import V1
from api.streams import sse
from service.jobs.accounts import ProjectName
from service.jobs.kinds.registry import JobSpec, KindName
from service.jobs.records import Conflict, Job, JobCounts, JobOrder, JobPage, Rejected
from service.jobs.spec.common import JobState
from service.jobs.store import JobFilter, Store, Submission, in_loop

router = APIRouter(tags=["jobs"], route_class=StrictRoute)

_SHOWN_BYTES = 200


@router.post(
    "/jobs",
    status_code=status.HTTP_201_CREATED,
    response_model=Job,
    responses={200: {"model": Job, "description": "the job that this idempotency key already submitted"}},
)
async def submit_job(body: JobSpec, call: Submitting) -> Job:
    """Submit a job, or with `sweep` a job for each combination of values, or with `kind: chain` jobs that name each
    other; the parent of several is then the answer. After a 201 they survive any crash.
    """
    jobs, key = call.context.store.jobs, call.key.name
    submission = await in_loop(jobs.submission, body, key, call.idempotency_key, project=call.project)
    try:
        job, created = await submit(submission, call.request)
    except Conflict as conflict:
        raise refused_key(conflict, call.idempotency_key) from conflict
    call.response.headers["Location"] = f"{V1}/jobs/{job.id}"
    if created:
        await audit_submissions(call.request, [job.id], project=job.project, name=job.name)
    else:
        call.response.status_code = status.HTTP_200_OK
    return job


async def submit(submission: Submission, request: Request) -> tuple[Job, bool]:
    """Submit a spec; return the job, or the parent of several, and whether it is new. No thread waits while the spec is
    checked, and a client that leaves ends the check.
    """
    context = context_of(request.app)
    if (known := await in_loop(context.store.jobs.known, submission)) is not None:
        return known, False
    accept = _accept_several if submission.spec.stands_for_others else _accept_one
    return await accept(submission, request, context.store, context.checker)


async def _accept_one(submission: Submission, request: Request, store: Store, checker: Checker) -> tuple[Job, bool]:
    asked = await in_loop(store.jobs.check_request, [submission])
    if problems := await while_connected(request, checker.problems(asked, submission.checked_for)):
        raise Rejected(problems)
    return await in_loop(store.jobs.accept, submission)


async def _accept_several(submission: Submission, request: Request, store: Store, checker: Checker) -> tuple[Job, bool]:
    """Accept the jobs of a sweep or a chain."""
    several = await run_in_threadpool(several_of, submission.spec)
    asked = await run_in_threadpool(several.request, store, submission.project)
    if problems := await while_connected(request, checker.problems(asked, submission.checked_for)):
        raise invalid(several.refusals(problems))
    return await run_in_threadpool(several.accept, store, submission)


async def _filter(
    *,
    key: Reader,
    kind: KindName | None = None,
    label: Annotated[
        str | None, Query(max_length=200, pattern="^[^=]", description="`key=value`, or `key` with any value")
    ] = None,
    owner: Annotated[str | None, Query(max_length=200)] = None,
    project: Annotated[ProjectName | None, Query(description="jobs of this project")] = None,
    sweep: SweepFilter = None,
    needs: NeedsFilter = None,
    q: Annotated[str | None, Query(max_length=200, description="part of a name or of an id")] = None,
) -> JobFilter:
    """Return the caller's filter, limited to jobs that the caller may see."""
    chosen = JobFilter(kind=kind, label=label, owner=owner, q=q, project=project, visible_to=key.project)
    return replace(chosen, sweep=sweep, needs=needs)


Filter = Annotated[JobFilter, Depends(_filter)]


@router.get("/jobs")
async def list_jobs(
    *,
    key: Reader,
    store: StoreDep,
    wanted: Filter,
    ids: JobIds | None = None,
    state: Annotated[list[JobState] | None, Query(description="jobs in any of these states")] = None,
    order: Annotated[
        JobOrder, Query(description="`active`: running jobs, then the queue in its order, then ended jobs")
    ] = "newest",
    include: Annotated[Literal["spec"] | None, Query(description="`spec`: with the spec of every job")] = None,
    limit: Limit = 50,
    cursor: PageCursor = None,
) -> JobPage:
    """List jobs, newest first, without specs unless requested; with ``ids``, those jobs in that order. A page
    of long records has fewer than ``limit`` jobs.
    """
    chosen, specs = replace(wanted, states=tuple(state or ())), include == "spec"
    listing = store.listing
    if ids is not None:
        page = await in_loop(listing.named, split_names(ids), chosen, limit, cursor, specs=specs)
    elif order == "active":
        page = await run_in_threadpool(listing.active, chosen, limit, cursor, specs=specs, queue=store.queue)
    else:
        page = await in_loop(listing.newest, chosen, limit, cursor, specs=specs)
    return page.model_copy(update={"items": tuple(as_seen(key, job) for job in page.items)})


@router.get("/jobs:counts")
def count_jobs(store: StoreDep, wanted: Filter) -> JobCounts:
    """Count jobs by state, with the filters of the list. Counting is bounded; the answer says when it was cut off."""
    return store.listing.counts(wanted)


@router.get("/jobs/{job_id}")
async def get_job(
    *,
    job: ReadableJob,
    key: Reader,
    store: StoreDep,
    hub: HubDep,
    wait_s: Annotated[float, Query(ge=0, description="wait until the job is over, 60 s at most")] = 0.0,
) -> Job:
    """Return one job; with ``wait_s``, wait until it has ended or the time has passed."""
    if wait_s == 0:
        return job
    return as_seen(key, await sse.wait_terminal(hub, store, job.id, min(wait_s, 60.0), key))


@router.post("/jobs/{job_id}/cancel", status_code=status.HTTP_202_ACCEPTED)
def cancel_job(job: ChangeableJob, request: Request, store: StoreDep) -> Job:
    """Cancel a job: a queued one at once; a running one is asked to end, then ended."""
    cancelled = store.jobs.cancel(job.id)
    audit(request, "job.cancel", job=job.id, owner=job.owner)
    return cancelled


async def _takes_no_changes(job: ChangeableJob, request: Request, store: StoreDep) -> None:
    """Refuse a body that would change the job: its attempts, checkpoints and metrics belong to its spec."""
    if (body := (await request.body()).strip()) in (b"", b"{}", b"null"):
        return
    instead = "a new job with the changed spec"
    steps = await run_in_threadpool(store.artifacts.steps_of_checkpoints, job.id)
    if job.kind == "train" and steps:
        instead += f", and resume: {{job: {job.id}}} to go on from the last checkpoint"
    got = body[:_SHOWN_BYTES].decode(errors="replace")
    raise invalid([FieldError(path="", message="a retry repeats the job as it is", got=got, expected=instead)])


@router.post("/jobs/{job_id}/retry", status_code=status.HTTP_202_ACCEPTED, dependencies=[Depends(_takes_no_changes)])
def retry_job(job: ChangeableJob, request: Request, store: StoreDep) -> Job:
    """Queue a failed or cancelled job again, as a new attempt that resumes from the last checkpoint. It takes
    no body: to change something, submit a new job, which may `resume` this one.
    """
    queued = store.jobs.retry(job.id)
    audit(request, "job.retry", job=job.id, owner=job.owner)
    return queued


@router.delete("/jobs/{job_id}", status_code=status.HTTP_204_NO_CONTENT)
def delete_job(job: ChangeableJob, request: Request, store: StoreDep) -> None:
    """Delete an ended job, its events and its artifacts."""
    store.jobs.delete(job.id)
    audit(request, "job.delete", job=job.id, owner=job.owner, name=job.name)
