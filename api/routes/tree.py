"""What a verification job tells of its instances: a row for each, and the trees that searches split."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from api import history
from api.access import ReadableJob
from api.context import SettingsDep, StoreDep
from api.params import Limit, refuse
from service.jobs.bounds_row import BoundsRow

router = APIRouter(tags=["bounds"])


class SplitTree(BaseModel):
    """One search. Each list but ``names`` has an entry for each domain shown; a domain comes before its halves."""

    technique: str = Field(description="`input splitting` or `activation splitting`")
    specification: int = Field(description="which of the property's boxes was searched, from 0")
    names: list[str] = Field(description="the inputs, or the neurons by their layers, that domains were split on")
    parent: list[int | None] = Field(description="the domain that this one is a half of; null for a root")
    on: list[int | None] = Field(description="what the parent was split on, an index of `names`; null for a root")
    side: list[int] = Field(description="1 where that is at least `at`, -1 where it is at most `at`, 0 for a root")
    at: list[float | None] = Field(description="where the parent was split")
    margin: list[float | None] = Field(description="the least margin that is proved of the domain; above 0 proves it")
    state: list[Literal["open", "split", "verified", "stuck"]] = Field(
        description="`stuck`: it is not proved, and cannot be split further"
    )
    below: list[int] = Field(description="domains below this one that are counted and not shown")
    open_below: list[int] = Field(description="those of them that still wait")
    counterexample: int | None = Field(description="the domain shown in which the counterexample is")


class InstanceTrees(BaseModel):
    """What the searches for one instance's verdict have split."""

    instance: int | None = Field(description="null where no search split anything")
    instances: list[int] = Field(description="all instances of the job whose searches split something")
    domains: int = Field(description="domains that were bounded, shown or not")
    seconds: float = Field(description="how long the searches had lasted")
    ranks: int = Field(description="ranks that searched together; the domains of the first of them are in the trees")
    searches: list[SplitTree] = Field(
        description="one for each search that split anything, in the order in which they began"
    )


_TREES = TypeAdapter(list[SplitTree])


@router.get("/jobs/{job_id}/tree")
def get_job_tree(
    *,
    job: ReadableJob,
    store: StoreDep,
    settings: SettingsDep,
    instance: Annotated[
        int | None, Query(ge=0, description="an instance; without it, the one that was split most")
    ] = None,
) -> InstanceTrees:
    """Return the trees that the searches for an instance's verdict have split, as far as they are on record."""
    if job.kind != "verify":
        raise refuse("job_id", f"a {job.kind} job has no searches", job.id, "the id of a verify job")
    found = {event["instance"]: event for event in history.events(store, settings.layout, job.id, frozenset({"tree"}))}
    known = sorted(found)
    chosen = max(known, key=lambda each: found[each]["domains"], default=None) if instance is None else instance
    event = found.get(chosen)
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
    """Return a rank's report; none if no rank of Trivet's own would write it."""
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
