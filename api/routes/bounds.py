"""Rows of a verification job."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, TypeAdapter

from api import history
from api.access import ReadableJob
from api.context import SettingsDep, StoreDep
from api.params import Limit, refuse
from service.jobs.bounds_row import BoundsRow

router = APIRouter(tags=["bounds"])


_ROWS = TypeAdapter(BoundsRow)


class BoundsPage(BaseModel):
    items: list[BoundsRow]
    next_cursor: str | None


@router.get("/jobs/{job_id}/bounds")
def get_job_bounds(
    *,
    job: ReadableJob,
    store: StoreDep,
    settings: SettingsDep,
    limit: Limit = 100,
    cursor: Annotated[str | None, Query(max_length=20, description="`next_cursor` of the page before")] = None,
) -> BoundsPage:
    """Return a row per instance, by instance; of an instance that was bounded again, the latest."""
    if job.kind != "verify":
        raise refuse("job_id", f"a {job.kind} job has no bounds", job.id, "the id of a verify job")
    first = _instance(cursor)
    rows = {
        event["instance"]: event
        for event in history.events(store, settings.layout, job.id, frozenset({"bound"}))
        if event["instance"] >= first
    }
    chosen = sorted(rows)[: limit + 1]
    following = str(chosen[limit]) if len(chosen) > limit else None
    items = [_ROWS.validate_python(rows[instance]) for instance in chosen[:limit]]
    return BoundsPage(items=items, next_cursor=following)


def _instance(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit()):
        raise refuse("cursor", "this is not a cursor of this list", cursor, "the 'next_cursor' of a page")
    return int(cursor)
