"""Serves the output of ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from api.callers import HubDep, ReadableJob, Reader
from api.reads import HistoryDep, while_staying, within
from api.requests import After, refuse, stream_id, wants_stream
from api.streams import sse
from service.jobs.events import Level, LineFilter
from service.jobs.store import Store
from service.jobs.store.tail import BEGINNING

router = APIRouter(tags=["logs"])

_LOGS = frozenset({"log"})
_PAGE = 2000
_WHOLE_LOG = 1_000_000
_TOGETHER = 1000
_TAIL_BYTES = 256 << 20
"""Most bytes of the last lines, which are held at once."""


class LogLine(BaseModel):
    """A line that a rank (or the service, with ``rank`` null) wrote. ``id`` is null for archived lines."""

    id: str | None
    time: float
    rank: int | None
    stream: Literal["stdout", "stderr", "service"]
    line: str

    @property
    def text(self) -> str:
        when = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        who = "service" if self.rank is None else f"rank {self.rank}"
        line = self.line.replace("\n", r"\n")
        return f"{when} [{who}] {line}\n"


@router.get(
    "/jobs/{job_id}/logs",
    response_class=Response,
    responses={
        200: {
            "description": "Lines; with `Accept: text/event-stream`, a live stream of `log` events.",
            "content": {
                "text/plain": {"schema": {"type": "string"}},
                "application/x-ndjson": {"schema": LogLine.model_json_schema()},
                "text/event-stream": {"schema": {"type": "string"}},
            },
        }
    },
)
async def get_job_logs(
    *,
    job: ReadableJob,
    request: Request,
    key: Reader,
    hub: HubDep,
    history: HistoryDep,
    rank: Annotated[int | None, Query(ge=0, description="only this rank")] = None,
    stream: Annotated[
        Literal["stdout", "stderr", "service"] | None, Query(description="only lines of this stream")
    ] = None,
    attempt: Annotated[int | None, Query(ge=1, description="only this attempt")] = None,
    q: Annotated[str | None, Query(max_length=200, description="only lines with this text, in any case")] = None,
    level: Annotated[
        Level | None, Query(description="only lines that speak of an error; with `warning`, of a warning too")
    ] = None,
    tail: Annotated[int | None, Query(ge=0, le=_WHOLE_LOG, description="only the last lines")] = None,
    after: After = None,
    format: Literal["text", "jsonl"] = "text",  # noqa: A002
) -> Any:
    """Log lines, oldest first; a live stream follows with every rank's lines, and takes no filter."""
    start = stream_id("after", after)
    if wants_stream(request):
        _refuse_filters(rank=rank, stream=stream, attempt=attempt, q=q, level=level, tail=tail)
        return sse.follow_job(hub, key, job, request, after, types=_LOGS)
    wanted = LineFilter(rank, stream, None if q is None else q.casefold(), level)
    if start != BEGINNING:
        _refuse_filters(attempt=attempt)
        lines = await run_in_threadpool(_last, _since(history.store, job.id, start), wanted, tail)
    elif tail is not None:
        lines = await run_in_threadpool(_newest, history.newest_logs(job.id, attempt), wanted, tail)
    else:
        found = history.events(job.id, _LOGS, attempt)
        lines = while_staying(map(_as_line, filter(wanted, _leave_out_live(found))))
    if format == "jsonl":
        written = (f"{line.model_dump_json()}\n" for line in lines)
        return StreamingResponse(_together(written), media_type="application/x-ndjson")
    return StreamingResponse(_together(line.text for line in lines), media_type="text/plain; charset=utf-8")


def _refuse_filters(**filters: object) -> None:
    for name, wanted in filters.items():
        if wanted is not None:
            raise refuse(name, "a live stream has every line, and so have the lines after an event", wanted, "none")


def _together(lines: Iterable[str]) -> Iterator[str]:
    """Yield many lines at once: each piece of an answer costs a change of threads."""
    left = iter(lines)
    while piece := "".join(islice(left, _TOGETHER)):
        yield piece


def _leave_out_live(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Leave out events that only tell followers about lines that they did not get."""
    return (event for event in events if not event.get("live"))


def _as_line(event: dict[str, Any]) -> LogLine:
    return LogLine.model_validate({**event, "id": None})


def _newest(newest_first: Iterable[dict[str, Any]], wanted: LineFilter, count: int) -> list[LogLine]:
    """Return the last requested lines without reading those before them."""
    found = within(filter(wanted, _leave_out_live(newest_first)), _TAIL_BYTES)
    return [_as_line(event) for event in islice(found, count)][::-1]


def _last(events: Iterator[dict[str, Any]], wanted: LineFilter, count: int | None) -> Iterable[LogLine]:
    found = map(LogLine.model_validate, filter(wanted, events))
    return found if count is None else deque(found, maxlen=count)


def _since(store: Store, job_id: str, after: str) -> Iterator[dict[str, Any]]:
    while (page := store.events.page(job_id, after=after, types=_LOGS, limit=_PAGE)).items:
        yield from ({**item.event, "id": item.id} for item in page.items)
        after = page.next_after
