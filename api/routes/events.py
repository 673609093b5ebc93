"""Serves events: a job's history in pages, and live streams over one job or several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from api.callers import Caller, HubDep, ReadableJob, Reader, StoreDep, visible_job
from api.requests import After, Limit, Types, refuse, resume_point, split_names, stream_id, wants_stream
from api.streams import Cursor, Form, sse
from service.jobs.events import EVENT_TYPES, EventType
from service.jobs.spec.common import JobState
from service.jobs.store import Store

router = APIRouter(tags=["events"])

_MAX_JOBS = 100


class EventItem(BaseModel, extra="allow"):
    """An event with its position. The other fields depend on the type."""

    id: str
    job: str
    type: EventType
    time: float
    rank: int | None


class EventItems(BaseModel):
    items: list[EventItem]
    next_after: str
    gap: bool
    """Whether the stream's cap removed events that the client has not seen."""


@router.get("/jobs/{job_id}/events", response_model=EventItems, responses=sse.RESPONSES)
async def get_job_events(
    *,
    job: ReadableJob,
    request: Request,
    key: Reader,
    store: StoreDep,
    hub: HubDep,
    after: After = None,
    types: Types = None,
    limit: Limit = 500,
) -> Any:
    """Return a page of events; with ``Accept: text/event-stream``, history and then live events until the job is
    over.
    """
    wanted = _choices("types", types, EVENT_TYPES)
    if not wants_stream(request):
        return await run_in_threadpool(_page, store, job.id, stream_id("after", after), wanted, limit)
    return sse.follow_job(hub, key, job, request, after, types=wanted)


def _page(store: Store, job_id: str, after: str, types: frozenset[str] | None, limit: int) -> EventItems:
    page = store.events.page(job_id, after=after, types=types, limit=limit)
    items = [EventItem.model_validate({**item.event, "id": item.id, "job": job_id}) for item in page.items]
    return EventItems(items=items, next_after=page.next_after, gap=page.gap)


@router.get("/events", response_class=Response, responses=sse.RESPONSES)
async def follow_events(
    *,
    request: Request,
    key: Reader,
    store: StoreDep,
    hub: HubDep,
    jobs: Annotated[
        str | None, Query(max_length=4000, description="job ids, separated by commas; all if absent")
    ] = None,
    after: After = None,
    types: Types = None,
) -> Response:
    """Stream live events of several jobs: of named jobs from their beginning, or of all jobs from now on."""
    wanted = _choices("types", types, EVENT_TYPES)
    states = {} if jobs is None else await run_in_threadpool(_states, key, store, jobs)
    point = resume_point(request, after)
    if point is not None:
        cursor = _composite_cursor(*point)
    elif jobs is None:
        cursor = Cursor(base=await hub.tail.now())
    else:
        cursor = Cursor()
    return sse.respond(hub, key, cursor, states, Form(composite=True, types=wanted), everything=jobs is None)


def _composite_cursor(path: str, text: str) -> Cursor:
    try:
        return Cursor.resume(text)
    except ValueError as error:
        raise refuse(path, str(error), text, "the id of an event of this stream") from None


def _choices(path: str, text: str | None, known: Iterable[str]) -> frozenset[str] | None:
    """Return names separated by commas; ``None`` when the parameter is absent."""
    if text is None:
        return None
    names = frozenset(split_names(text))
    unknown = sorted(names.difference(known))
    if unknown or not names:
        raise refuse(path, f"there is no {', '.join(unknown) or 'name given'}", text, f"some of {', '.join(known)}")
    return names


def _states(caller: Caller, store: Store, jobs: str) -> dict[str, JobState]:
    ids = split_names(jobs)
    if not 1 <= len(ids) <= _MAX_JOBS:
        raise refuse("jobs", f"{len(ids)} jobs are named", jobs, f"1 to {_MAX_JOBS} ids, or no 'jobs' for all")
    return {job_id: visible_job(caller, store, job_id).state for job_id in ids}
