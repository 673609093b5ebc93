"""Serves timelines: each rank's spans, step by step, and the spans that belong to no step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel

from api.callers import ReadableJob
from api.reads import HistoryDep, within
from api.requests import ProblemError

router = APIRouter(tags=["timeline"])

FIRST = "data"
"""The span with which every rank begins a step."""

MOST_SPANS = 200_000
"""Most spans that are read. Ranks report those of the first steps and of a sample, but may write any number.
"""

MOST_BYTES = 64 << 20
"""Most bytes of them."""

Steps = dict[int, dict[int | None, list[Mapping[str, Any]]]]


class Span(BaseModel):
    """A timed piece of work; ``start`` and ``end`` in Unix seconds. For instructions of a pipeline, ``detail``
    has ``op``, ``stage`` and ``micro_batch``."""

    rank: int | None
    name: str
    start: float
    end: float
    detail: dict[str, Any]


class StepTimeline(BaseModel):
    """The spans of one step by rank and start, and the steps that have any: the first ones and a sample.
    ``apart`` are the spans that belong to no step, in order of arrival.
    """

    steps: list[int]
    step: int | None
    spans: list[Span]
    apart: list[Span]


@router.get("/jobs/{job_id}/timeline")
def get_job_timeline(
    *,
    job: ReadableJob,
    history: HistoryDep,
    step: Annotated[int | None, Query(ge=0, description="the newest whole one when absent")] = None,
) -> StepTimeline:
    """Return what each rank did in one step, by its own measurement."""
    events = list(islice(within(history.events(job.id, frozenset({"span"})), MOST_BYTES), MOST_SPANS))
    found = _by_step(events)
    if step is not None and step not in found:
        known = f"steps {min(found)} to {max(found)} have some" if found else "no step has any yet"
        raise ProblemError(404, f"there are no spans of step {step} of job {job.id}; {known}")
    chosen = newest(found) if step is None else step
    spans = [span for rank in found.get(chosen, {}).values() for span in rank] if chosen is not None else []
    order = sorted(_rows(spans), key=lambda span: (-1 if span.rank is None else span.rank, span.start))
    apart = _rows(event for event in events if _step(event) is None)
    return StepTimeline(steps=sorted(found), step=chosen, spans=order, apart=apart)


def _rows(spans: Iterable[Mapping[str, Any]]) -> list[Span]:
    return [Span.model_validate({**span, "detail": _detail(span)}) for span in spans]


def _detail(span: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a span's details; empty if they are not an object, which a package's code may cause."""
    detail = span.get("detail")
    return detail if isinstance(detail, dict) else {}


def _step(span: Mapping[str, Any]) -> int | None:
    step = _detail(span).get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def newest(steps: Steps) -> int | None:
    """Return the last step with its own spans, not only those of a checkpoint or an evaluation after it."""
    whole = [
        step for step, ranks in steps.items() if any(span["name"] == FIRST for rank in ranks.values() for span in rank)
    ]
    return max(whole or steps, default=None)


def _by_step(events: Iterable[Mapping[str, Any]]) -> Steps:
    """Return ``step -> rank -> spans``. A rank that begins a step again, in a later attempt, replaces its
    earlier spans.
    """
    steps: Steps = {}
    for event in events:
        step = _step(event)
        if step is None:
            continue
        ranks = steps.setdefault(step, {})
        if event["name"] == FIRST:
            ranks[event["rank"]] = []
        ranks.setdefault(event["rank"], []).append(event)
    return steps
