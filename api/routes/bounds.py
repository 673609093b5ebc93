"""Rows of a verification job."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from api import history
from api.context import SettingsDep, StoreDep
from api.params import Limit, refuse
from api.security import Reader

router = APIRouter(tags=["bounds"])


class BoundsRow(BaseModel):
    """Certified output bounds of one instance.

    ``margin`` is the least certified distance from a violation: above zero (beyond rounding) means verified.
    ``name`` is the query's path in its archive; ``label`` and ``prediction`` are the class of a sample and the model's
    for it. ``decided_by`` says what gave the verdict: bounds, a witness (the
    sample itself, the centre of the box), an attack, or a search by splitting inputs or activations; ``reason`` why
    none was reached.
    ``counterexample_outputs`` are the model's at the counterexample, computed in float64; ``onnxruntime_outputs`` are
    those that onnxruntime gives there, of a model from ONNX.
    """

    instance: int
    name: str | None = None
    label: int | None = None
    prediction: int | None = None
    verdict: Literal["verified", "falsified", "unknown", "timeout"]
    lower: list[float | None]
    upper: list[float | None]
    margin: float | None
    method: str
    decided_by: str | None = None
    reason: str | None = None
    seconds: float
    domains: int
    counterexample: list[float] | None
    counterexample_outputs: list[float | None] | None = None
    onnxruntime_outputs: list[float | None] | None = None


class BoundsPage(BaseModel):
    items: list[BoundsRow]
    next_cursor: str | None


@router.get("/jobs/{job_id}/bounds")
def job_bounds(
    *,
    job_id: str,
    key: Reader,
    store: StoreDep,
    settings: SettingsDep,
    limit: Limit = 100,
    cursor: Annotated[str | None, Query(max_length=20, description="`next_cursor` of the page before")] = None,
) -> BoundsPage:
    """A row per instance, by instance; of an instance that was bounded again, the latest."""
    job = store.jobs.get(job_id)
    if job.kind != "verify":
        raise refuse("job_id", f"a {job.kind} job has no bounds", job_id, "the id of a verify job")
    first = _instance(cursor)
    rows = {
        event["instance"]: event
        for event in history.events(store, settings.layout, job_id, frozenset({"bound"}))
        if event["instance"] >= first
    }
    chosen = sorted(rows)[: limit + 1]
    following = str(chosen[limit]) if len(chosen) > limit else None
    items = [BoundsRow.model_validate(rows[instance]) for instance in chosen[:limit]]
    return BoundsPage(items=items, next_cursor=following)


def _instance(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit()):
        raise refuse("cursor", "this is not a cursor of this list", cursor, "the 'next_cursor' of a page")
    return int(cursor)
