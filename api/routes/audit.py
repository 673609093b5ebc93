"""Serves the audit log: who did what."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from api.callers import Admin, StoreDep
from api.requests import Limit, Moment, PageCursor, refuse
from service.jobs.records.audit import AuditAction, AuditEntry, AuditPage
from service.jobs.store import AuditFilter

router = APIRouter(tags=["audit"])

_MEDIA_TYPE = "application/x-ndjson"


@router.get(
    "/audit",
    response_model=AuditPage,
    responses={
        200: {
            "description": "A page of entries; with `format=jsonl`, all of them as lines, oldest first.",
            "content": {_MEDIA_TYPE: {"schema": AuditEntry.model_json_schema(mode="serialization")}},
        }
    },
)
def list_audit(
    *,
    key: Admin,
    store: StoreDep,
    since: Annotated[Moment | None, Query(description="only entries of this time or later")] = None,
    until: Annotated[Moment | None, Query(description="only entries before this time")] = None,
    actor: Annotated[str | None, Query(max_length=200, description="name of a key")] = None,
    action: AuditAction | None = None,
    job: Annotated[str | None, Query(max_length=200, description="id of a job")] = None,
    limit: Limit = 50,
    cursor: PageCursor = None,
    format: Literal["json", "jsonl"] = "json",  # noqa: A002
) -> Any:
    """List audit entries, newest first. A page may have fewer entries than ``limit`` although more follow."""
    wanted = AuditFilter(since=since, until=until, actor=actor, action=action, job=job)
    if format == "jsonl":
        return StreamingResponse(store.audit.lines(wanted), media_type=_MEDIA_TYPE)
    return store.audit.page(wanted, limit=limit, before=_number(cursor))


def _number(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdigit() and 0 < int(cursor) < 1 << 63):
        raise refuse("cursor", "this is not a cursor of this list", cursor, "`next_cursor` of the previous page")
    return int(cursor)
