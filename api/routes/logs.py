"""Serves what the ranks printed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from api import history, sse
from api.context import HubDep, SettingsDep, StoreDep
from api.frames import Cursor
from api.params import After, resume_point, stream_id, wants_stream
from api.security import Reader
from service.jobs.layout import DataLayout
from service.jobs.store import Store
from service.jobs.store.tail import BEGINNING

router = APIRouter(tags=["logs"])

_LOGS = frozenset({"log"})
_PAGE = 2000
_WHOLE_LOG = 1_000_000


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
async def job_logs(
    *,
    job_id: str,
    request: Request,
    key: Reader,
    store: StoreDep,
    settings: SettingsDep,
    hub: HubDep,
    rank: Annotated[int | None, Query(ge=0, description="only this rank")] = None,
    tail: Annotated[int | None, Query(ge=0, le=_WHOLE_LOG, description="only the last lines")] = None,
    after: After = None,
    format: Literal["text", "jsonl"] = "text",  # noqa: A002
) -> Any:
    """Log lines, oldest first; a live stream follows with every rank's lines."""
    job = await run_in_threadpool(store.jobs.get, job_id)
    if wants_stream(request):
        point = resume_point(request, after)
        cursor = Cursor(base=BEGINNING if point is None else stream_id(*point))
        return sse.respond(hub, key, cursor, {job_id: job.state}, types=_LOGS, single=True)
    start = stream_id("after", after)
    found = _from_start(store, settings.layout, job_id) if start == BEGINNING else _since(store, job_id, start)
    lines = await run_in_threadpool(_chosen, found, rank, tail)
    if format == "jsonl":
        return StreamingResponse((f"{line.model_dump_json()}\n" for line in lines), media_type="application/x-ndjson")
    return StreamingResponse((line.text for line in lines), media_type="text/plain; charset=utf-8")


def _chosen(lines: Iterator[LogLine], rank: int | None, tail: int | None) -> Iterable[LogLine]:
    found = (line for line in lines if rank is None or line.rank == rank)
    return found if tail is None else deque(found, maxlen=tail)


def _from_start(store: Store, data: DataLayout, job_id: str) -> Iterator[LogLine]:
    for event in history.events(store, data, job_id, _LOGS):
        yield LogLine.model_validate({"id": None, **event})


def _since(store: Store, job_id: str, after: str) -> Iterator[LogLine]:
    while (page := store.events.page(job_id, after=after, types=_LOGS, limit=_PAGE)).items:
        yield from (LogLine.model_validate({**item.event, "id": item.id}) for item in page.items)
        after = page.next_after
