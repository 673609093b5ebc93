"""Metrics of a job as downsampled series."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from api import history
from api.access import ReadableJob
from api.context import SettingsDep, StoreDep

router = APIRouter(tags=["metrics"])


class MetricSeries(BaseModel):
    """One metric; the three lists are parallel. ``time`` is in Unix seconds."""

    step: list[int]
    time: list[float]
    value: list[float | None]


class SeriesByName(BaseModel):
    series: dict[str, MetricSeries]
    after: str | None
    """Follow the job's events from here to see what comes next."""


@router.get(
    "/jobs/{job_id}/metrics",
    response_model=SeriesByName,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
def get_job_metrics(
    *,
    job: ReadableJob,
    store: StoreDep,
    settings: SettingsDep,
    names: Annotated[str | None, Query(max_length=2000, description="separated by commas; all when absent")] = None,
    max_points: Annotated[int, Query(ge=10, le=100_000, description="per series, keeping extremes")] = 1000,
    format: Literal["json", "csv"] = "json",  # noqa: A002
) -> Any:
    """Return every metric that the job reported, by name."""
    after = store.events.latest_id(job.id)
    wanted = None if names is None else frozenset(name.strip() for name in names.split(","))
    found = collect(history.events(store, settings.layout, job.id, frozenset({"metric"})), wanted)
    thinned = {name: _thin(series, max_points) for name, series in sorted(found.items())}
    if format == "csv":
        return Response(_csv(thinned), media_type="text/csv; charset=utf-8")
    return SeriesByName(series=thinned, after=after)


Points = dict[int, tuple[float, float | None]]


def collect(events: Iterable[Mapping[str, Any]], wanted: frozenset[str] | None) -> dict[str, Points]:
    """Return ``name -> step -> (time, value)``; a step that a later attempt repeats counts as that attempt saw it."""
    found: dict[str, Points] = {}
    for event in events:
        for name, value in event["values"].items():
            if wanted is None or name in wanted:
                found.setdefault(name, {})[event["step"]] = (event["time"], value)
    return found


def _thin(points: Points, max_points: int) -> MetricSeries:
    steps = sorted(points)
    kept = [steps[index] for index in downsample([points[step][1] for step in steps], max_points)]
    return MetricSeries(step=kept, time=[points[step][0] for step in kept], value=[points[step][1] for step in kept])


def _csv(series: Mapping[str, MetricSeries]) -> str:
    """Return a row per point: spreadsheets and data frames pivot as they like."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", "step", "time", "value"))
    for name, points in series.items():
        for step, when, value in zip(points.step, points.time, points.value, strict=True):
            writer.writerow((name, step, when, "" if value is None else value))
    return text.getvalue()


def downsample(values: Sequence[float | None], max_points: int) -> list[int]:
    """Return indices to keep, ascending, at most ``max_points`` of them: the first, the last, and the least and
    greatest of equal stretches between (so also those of the whole series). A short series is kept whole.

    What is not a finite number is kept only at the ends, and in a stretch that holds nothing else.
    Raises ``ValueError`` for ``max_points < 4``, which cannot hold both ends and both extremes.
    """
    if max_points < 4:
        raise ValueError(f"max_points is {max_points}; expected 4 or more (both ends and both extremes)")
    count = len(values)
    if count <= max_points:
        return list(range(count))
    stretches = (max_points - 2) // 2
    inner = count - 2
    kept = [0]
    for stretch in range(stretches):
        start, end = 1 + inner * stretch // stretches, 1 + inner * (stretch + 1) // stretches
        kept += _extremes(values, start, end)
    return [*kept, count - 1]


def _extremes(values: Sequence[float | None], start: int, end: int) -> list[int]:
    """Return one or two indices of ``start … end-1``, ascending."""
    finite = [
        (value, index) for index in range(start, end) if (value := values[index]) is not None and math.isfinite(value)
    ]
    if not finite:
        return [start]
    return sorted({min(finite)[1], max(finite)[1]})
