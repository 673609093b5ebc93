"""Serves metrics of jobs as downsampled series."""

from __future__ import annotations

import csv
import io
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from api.callers import ReadableJob, Reader
from api.reads import EventHistory, HistoryDep
from api.requests import JobIds, split_names
from service.jobs.events.curves import MetricSeries, downsample, read_curves
from service.jobs.records import Job, ListedJob
from service.jobs.spec.common import TERMINAL
from service.jobs.store import JobFilter, Store

router = APIRouter(tags=["metrics"])


NO_NAME = frozenset({"-"})
"""A name that no metric has: pages request it to get only the position from which to follow a job's events."""


class SeriesByName(BaseModel):
    series: dict[str, MetricSeries]
    after: str | None
    """The position from which to follow the job's events."""


@router.get(
    "/jobs/{job_id}/metrics",
    response_model=SeriesByName,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
def get_job_metrics(
    *,
    job: ReadableJob,
    history: HistoryDep,
    names: Annotated[str | None, Query(max_length=2000, description="separated by commas; all when absent")] = None,
    max_points: Annotated[int, Query(ge=10, le=100_000, description="per series, keeping extremes")] = 1000,
    format: Literal["json", "csv"] = "json",  # noqa: A002
) -> Any:
    """Return every metric that the job reported, by name."""
    after = history.store.events.latest_id(job.id)
    wanted = None if names is None else frozenset(name.strip() for name in names.split(","))
    curves = {} if wanted == NO_NAME else _curves(history, job, max_points, wanted)[1]
    thinned = {name: curve for name, curve in curves.items() if wanted is None or name in wanted}
    if format == "csv":
        return Response(_csv(thinned), media_type="text/csv; charset=utf-8")
    return SeriesByName(series=thinned, after=after)


class JobCurves(BaseModel):
    """The metrics of one of several jobs."""

    job: str
    names: list[str]
    """Every metric of the job, including those that were not requested."""
    series: dict[str, MetricSeries]


class CurvesOfJobs(BaseModel):
    """Metrics of several jobs, in the order in which the jobs were named."""

    items: list[JobCurves]


@router.get("/jobs:metrics")
def compare_metrics(
    *,
    ids: JobIds,
    key: Reader,
    history: HistoryDep,
    names: Annotated[str, Query(max_length=2000, description="separated by commas; none when empty")] = "",
    max_points: Annotated[int, Query(ge=10, le=10_000, description="per series, keeping extremes")] = 400,
) -> CurvesOfJobs:
    """Return some metrics of several jobs, to draw on one axis, and the names of all metrics of each."""
    wanted = split_names(names)
    found = []
    for job in _find_named_jobs(history.store, split_names(ids), JobFilter(visible_to=key.project)):
        known, curves = _curves(history, job, max_points, frozenset(wanted), all_names=True)
        chosen = {name: curves[name] for name in wanted if name in curves}
        found.append(JobCurves(job=job.id, names=known, series=chosen))
    return CurvesOfJobs(items=found)


def _find_named_jobs(store: Store, ids: Sequence[str], filters: JobFilter) -> Iterator[ListedJob]:
    """Yield the jobs that exist and match, in order, over any number of pages."""
    cursor: str | None = None
    while True:
        page = store.listing.named(ids, filters, len(ids), cursor, specs=False)
        yield from page.items
        cursor = page.next_cursor
        if cursor is None:
            return


def _curves(
    history: EventHistory,
    job: ListedJob | Job,
    max_points: int,
    wanted: frozenset[str] | None,
    *,
    all_names: bool = False,
) -> tuple[list[str], dict[str, MetricSeries]]:
    """Return the names of a job's metrics and its curves, at least the wanted ones. A running job gives only
    the wanted names unless ``all_names``. For an ended job, everything that was read is kept for the next
    request.
    """
    key = (str(history.data.root), job.id, job.attempt, job.ended_at, max_points)
    is_over = job.state in TERMINAL
    known = _KEPT.get(key)
    if known is None:
        if is_over and (short := _short(history, job, wanted, max_points)) is not None:
            return short
        asked = None if is_over or all_names else wanted
        found = collect(history.events(job.id, frozenset({"metric"})), asked, max_points)
        known = {name: _thin(points, max_points) for name, points in sorted(found.items())}
        if is_over:
            _KEPT.put(key, known, sum(len(series.step) for series in known.values()))
    return list(known), known


def _short(
    history: EventHistory, job: ListedJob | Job, wanted: frozenset[str] | None, max_points: int
) -> tuple[list[str], dict[str, MetricSeries]] | None:
    """Return the curves that an ended job's supervisors left, if they are complete."""
    folders = history.attempts(job.id)
    if list(folders) != list(range(1, job.attempt + 1)):
        return None
    return read_curves(list(folders.values()), wanted, max_points)


class _KeptCurves:
    """Keeps the most recently requested curves, up to a number of points. Threads may share it."""

    def __init__(self, most_points: int) -> None:
        self._most, self._points = most_points, 0
        self._kept: OrderedDict[Hashable, tuple[dict[str, MetricSeries], int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> dict[str, MetricSeries] | None:
        """Return the curves of a key, which is then the last to be dropped."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Hashable, curves: dict[str, MetricSeries], points: int) -> None:
        """Keep curves; if there are too many points, drop those requested longest ago."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = (curves, points)
                self._points += points
            while self._points > self._most:
                self._points -= self._kept.popitem(last=False)[1][1]


_KEPT = _KeptCurves(most_points=5_000_000)
Points = dict[int, tuple[float, float | None]]
MOST_POINTS = 5_000_000
"""Most points that are held at once for one job. Beyond, all series are thinned, and then points that do not
fit are dropped: a job's own record may have any length.
"""


def collect(
    events: Iterable[Mapping[str, Any]], wanted: frozenset[str] | None, max_points: int = 1000
) -> dict[str, Points]:
    """Return ``name -> step -> (time, value)``; a step that a later attempt repeats counts as that attempt saw it."""
    found: dict[str, Points] = {}
    count = 0
    for event in events:
        for name, value in event["values"].items():
            if wanted is not None and name not in wanted:
                continue
            if count >= MOST_POINTS:
                for each in found.values():
                    _thin_in_place(each, max_points)
                count = sum(map(len, found.values()))
                if count > MOST_POINTS / 2:
                    return found
            points = found.setdefault(name, {})
            count += event["step"] not in points
            points[event["step"]] = (event["time"], value)
    return found


def _thin_in_place(points: Points, max_points: int) -> None:
    kept = set(_choose_steps(points, max_points))
    for step in [step for step in points if step not in kept]:
        del points[step]


def _choose_steps(points: Points, max_points: int) -> list[int]:
    steps = sorted(points)
    return [steps[index] for index in downsample([points[step][1] for step in steps], max_points)]


def _thin(points: Points, max_points: int) -> MetricSeries:
    kept = _choose_steps(points, max_points)
    return MetricSeries(step=kept, time=[points[step][0] for step in kept], value=[points[step][1] for step in kept])


def _csv(series: Mapping[str, MetricSeries]) -> str:
    """Return a row per point, for spreadsheets and data frames to pivot."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", "step", "time", "value"))
    for name, points in series.items():
        for step, when, value in zip(points.step, points.time, points.value, strict=True):
            writer.writerow((name, step, when, "" if value is None else value))
    return text.getvalue()
