"""Serves a verification's rows, one per instance, and the trees of its searches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from api.callers import ReadableJob
from api.reads import HistoryDep
from api.requests import Limit, refuse
from service.jobs.events import BoundsRow

router = APIRouter(tags=["bounds"])

_PAGE_BYTES = 16 << 20
"""Bytes of rows after which a page takes no more of them."""
_MOST_TREES = 1_000_000
"""Most reports of trees that are looked at."""


class SplitTree(BaseModel):
    """The tree of one search. Each list but ``names`` has an entry for each shown domain; a domain comes before its
    halves.
    """

    technique: str = Field(description="`input splitting` or `activation splitting`")
    specification: int = Field(description="number of the searched box of the property, from 0")
    names: list[str] = Field(description="the inputs, or the neurons by layer, on which domains were split")
    parent: list[int | None] = Field(description="the domain whose half this is; null for a root")
    on: list[int | None] = Field(description="index in `names` of what the parent was split on; null for a root")
    side: list[int] = Field(description="1 if it is at least `at` here, -1 if at most `at`, 0 for a root")
    at: list[float | None] = Field(description="where the parent was split")
    margin: list[float | None] = Field(
        description="the proved lower bound of the domain's margin; above 0 it is proved"
    )
    state: list[Literal["open", "split", "verified", "stuck"]] = Field(
        description="`stuck`: it is not proved, and cannot be split further"
    )
    below: list[int] = Field(description="domains below this one that are counted but not shown")
    open_below: list[int] = Field(description="number of them that still wait")
    stuck_below: list[int] = Field([], description="number of them that are stuck; empty of an older version's search")
    counterexample: int | None = Field(description="the shown domain that contains the counterexample")


class InstanceTrees(BaseModel):
    """The trees of the searches for one instance's verdict."""

    instance: int | None = Field(description="null if no search split anything")
    instances: list[int] = Field(description="all instances of the job whose searches split something")
    domains: int = Field(description="domains that were bounded, shown or not")
    seconds: float = Field(description="seconds that the searches had lasted")
    ranks: int = Field(description="ranks that searched together; the trees have the domains of the first one")
    searches: list[SplitTree] = Field(
        description="one for each search that split anything, in order of their beginning"
    )


_TREES = TypeAdapter(list[SplitTree])


@router.get("/jobs/{job_id}/tree")
def get_job_tree(
    *,
    job: ReadableJob,
    history: HistoryDep,
    instance: Annotated[
        int | None, Query(ge=0, description="the instance; without it, the one that was split most")
    ] = None,
) -> InstanceTrees:
    """Return the trees of the searches for an instance's verdict, as far as they are recorded."""
    if job.kind != "verify":
        raise refuse("job_id", f"a {job.kind} job has no searches", job.id, "the id of a verify job")

    def read() -> Iterator[dict[str, Any]]:
        return history.events(job.id, frozenset({"tree"}))

    found = {each["instance"]: each["domains"] for each in islice(read(), _MOST_TREES)}
    known = sorted(found)
    chosen = max(known, key=lambda each: found[each], default=None) if instance is None else instance
    event = None
    for each in read() if chosen in found else ():  # trees are too large to keep those of all instances
        event = each if each["instance"] == chosen else event
    if event is None:
        return InstanceTrees(instance=instance, instances=known, domains=0, seconds=0.0, ranks=1, searches=[])
    return InstanceTrees(
        instance=chosen,
        instances=known,
        domains=event["domains"],
        seconds=event["seconds"],
        ranks=event["ranks"],
        searches=_searches(event),
    )


def _searches(event: dict[str, Any]) -> list[SplitTree]:
    """Return a rank's report; ``None`` if it does not have the form of Trivet's own."""
    with suppress(ValidationError):
        return _TREES.validate_python(event["searches"])
    return []


_ROWS = TypeAdapter(BoundsRow)


class BoundsPage(BaseModel):
    items: list[BoundsRow]
    next_cursor: str | None


@router.get("/jobs/{job_id}/bounds")
def get_job_bounds(
    *,
    job: ReadableJob,
    history: HistoryDep,
    limit: Limit = 100,
    cursor: Annotated[str | None, Query(max_length=20, description="`next_cursor` of the previous page")] = None,
) -> BoundsPage:
    """Return a row per instance, by instance; the latest one of an instance that was bounded again."""
    if job.kind != "verify":
        raise refuse("job_id", f"a {job.kind} job has no bounds", job.id, "the id of a verify job")
    first = _instance(cursor)
    rows = _FirstRows(limit, first)
    for event in history.events(job.id, frozenset({"bound"})):
        rows.take(event)
    chosen = sorted(rows.held)[:limit]
    items = [row for instance in chosen for row in _rows(rows.held[instance])]
    return BoundsPage(items=items, next_cursor=None if rows.following is None else str(rows.following))


def _rows(event: dict[str, Any]) -> Iterator[BoundsRow]:
    """Yield the row of a rank's report; none if it does not have the form of Trivet's own."""
    with suppress(ValidationError):
        yield _ROWS.validate_python(event)


class _FirstRows:
    """Keeps the newest row of each of the first instances, as many as a page has, in no more bytes than it may have."""

    def __init__(self, limit: int, first: int) -> None:
        self._limit, self._first = limit, first
        self.held: dict[int, dict[str, Any]] = {}
        self.following: int | None = None
        """The first instance of the next page."""
        self._sizes: dict[int, int] = {}
        self._bytes = 0

    def take(self, event: dict[str, Any]) -> None:
        instance = event["instance"]
        if instance < self._first or (self.following is not None and instance >= self.following):
            return
        size = len(orjson.dumps(event))
        self._bytes += size - self._sizes.get(instance, 0)
        self.held[instance], self._sizes[instance] = event, size
        while len(self.held) > 1 and (len(self.held) > self._limit or self._bytes > _PAGE_BYTES):
            self.following = max(self.held)
            self._bytes -= self._sizes.pop(self.following)
            del self.held[self.following]


def _instance(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit()):
        raise refuse("cursor", "this is not a cursor of this list", cursor, "the 'next_cursor' of a page")
    return int(cursor)
