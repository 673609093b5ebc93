"""Keeps thinned curves of an attempt beside its record, so that an ended job's first chart needs one short read
instead of the whole record.

A supervisor thins metrics as it relays them, and leaves one file. Its first line says where each curve begins,
and how many bytes of which event files it covers; then comes a line for each curve and each of :data:`LEVELS`.
:func:`read_curves` uses the file only if it covers all events. Files are checked when read, since ranks may
have written there.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

from service.jobs.events.packed import record_sizes
from service.jobs.files import Folder

LEVELS = (100, 400, 2000)
"""Most points of a curve: for many jobs on one axis, and for one job."""
_MOST_POINTS = 1_000_000
"""Most points of all curves of one file: with too many names there is no file."""
_MOST_NAMES = 10_000
"""Most metrics of which curves are kept: with more there is no file."""
_MOST_BYTES = 256 << 20
_LONGEST_HEAD = 16 << 20
_NAME = "curves.rank-{}.jsonl"
_FILES = "curves.rank-*.jsonl"
_OF_RANKS = re.compile(r"events\.rank-\d+\.jsonl")

Point = tuple[int, float, float | None]
"""Step, time in Unix seconds, value."""


class MetricSeries(BaseModel):
    """One metric; the three lists are parallel. ``time`` is in Unix seconds."""

    step: list[int]
    time: list[float]
    value: list[float | None]

    @classmethod
    def of(cls, points: Sequence[Point]) -> MetricSeries:
        return cls.model_construct(
            step=[step for step, _, _ in points],
            time=[when for _, when, _ in points],
            value=[value for _, _, value in points],
        )

    def points(self) -> Iterator[Point]:
        return zip(self.step, self.time, self.value, strict=True)

    def thinned(self, most: int) -> MetricSeries:
        """Return this curve with at most ``most`` points."""
        if len(self.step) <= most:
            return self
        points = list(self.points())
        return MetricSeries.of([points[index] for index in downsample(self.value, most)])


def downsample(values: Sequence[float | None], max_points: int) -> list[int]:
    """Return indices to keep, ascending, at most ``max_points`` of them: the first, the last, and the least and
    greatest of equal stretches between (so also those of the whole series). A short series is kept whole.

    Values that are not finite are kept only at the ends, and in a stretch without others. Raises ``ValueError`` for
    ``max_points < 4``, which cannot hold both ends and both extremes.
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


class _GrowingCurve:
    """One growing curve: first all of its points, then the extremes of equal stretches of steps, which double
    in width whenever there are too many.
    """

    def __init__(self) -> None:
        self.width = 1
        self.stretches: dict[int, tuple[Point, Point]] = {}
        self.first: Point | None = None
        self.last: Point | None = None

    def add(self, point: Point) -> None:
        self.first = self.first or point
        self.last = point
        place = point[0] // self.width
        held = self.stretches.get(place)
        self.stretches[place] = (point, point) if held is None or self.width == 1 else _with(held, point)
        if len(self.stretches) > LEVELS[-1]:
            self._widen()

    def _widen(self) -> None:
        self.width *= 2
        before, self.stretches = self.stretches, {}
        for low, high in before.values():
            place = low[0] // self.width
            held = self.stretches.get(place)
            self.stretches[place] = (low, high) if held is None else _with(_with(held, low), high)

    def curve(self) -> MetricSeries:
        """Return its points by step; the newest one of each step."""
        ends = [each for each in (self.first, self.last) if each is not None]
        kept = [point for pair in self.stretches.values() for point in pair]
        found = {point[0]: point for point in (kept if self.width == 1 else [*kept, *ends])}
        return MetricSeries.of([found[step] for step in sorted(found)])


def _with(held: tuple[Point, Point], point: Point) -> tuple[Point, Point]:
    """Return the least and the greatest of the points so far and a new one, preferring finite ones."""
    value = point[2]
    if not _is_finite(value):
        return held
    low, high = held
    return (
        point if not _is_finite(low[2]) or value < low[2] else low,  # type: ignore[operator]
        point if not _is_finite(high[2]) or value >= high[2] else high,  # type: ignore[operator]
    )


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


@dataclass
class CurveKeeper:
    """Thins the metrics of an attempt as they arrive, and writes them at its end."""

    _curves: dict[str, _GrowingCurve] = field(default_factory=dict)
    _has_all: bool = True

    def take(self, event: Mapping[str, Any]) -> None:
        step, when = event["step"], event["time"]
        for name, value in event["values"].items():
            if (curve := self._curves.get(name)) is None:
                if len(self._curves) == _MOST_NAMES:
                    self._has_all = False
                    continue
                curve = self._curves[name] = _GrowingCurve()
            curve.add((step, when, value))

    def curve(self, name: str) -> MetricSeries:
        """Return the kept points of one metric. Raises :class:`KeyError`."""
        return self._curves[name].curve()

    def write(self, folder: Path, rank: int, sources: Mapping[str, int]) -> None:
        """Write the file of one host's ranks, of which ``rank`` is the first, into the folder of an attempt: it was
        made of so many bytes of these event files. Raises :class:`OSError`.
        """
        if not self._has_all or sum(len(each.stretches) for each in self._curves.values()) > _MOST_POINTS:
            return
        body, places, at = [], {}, 0
        for name, growing in sorted(self._curves.items()):
            whole = growing.curve()
            lines = [orjson.dumps(whole.thinned(most).model_dump()) + b"\n" for most in LEVELS]
            places[name] = {
                "whole": growing.width == 1,
                "levels": [[at + sum(map(len, lines[:level])), len(line)] for level, line in enumerate(lines)],
                "points": len(whole.step),
            }
            at += sum(map(len, lines))
            body += lines
        head = orjson.dumps({"sources": dict(sources), "curves": places})
        with Folder.open(folder) as attempt:
            attempt.write(_NAME.format(rank), b"\n".join([head, b"".join(body)]))


class _CurvePlace(BaseModel):
    whole: bool
    levels: list[tuple[int, int]]
    points: int

    def level(self, most: int) -> int | None:
        """Return the coarsest level that has the wanted number of points, or all points; None if there is none."""
        for level, points in enumerate(LEVELS[: len(self.levels)]):
            if most <= points or (self.whole and self.points <= points):
                return level
        return None


class _CurveHead(BaseModel):
    sources: dict[str, int]
    curves: dict[str, _CurvePlace]


def read_curves(
    attempts: Sequence[Path], wanted: Collection[str] | None, most: int
) -> tuple[list[str], dict[str, MetricSeries]] | None:
    """Return the names of all metrics of these attempts, in order, and the wanted curves (all for ``None``) with
    at most ``most`` points; None if the files do not cover everything, so that the record must be read.

    A later attempt overrides the steps that it repeated.
    """
    names: set[str] = set()
    found: dict[str, MetricSeries] = {}
    try:
        for folder in attempts:
            of_attempt = _of_attempt(folder, wanted, most)
            if of_attempt is None:
                return None
            names |= of_attempt[0]
            for name, curve in of_attempt[1].items():
                found[name] = _continued(found[name], curve) if name in found else curve
    except (OSError, ValueError):
        return None
    return sorted(names), {name: found[name].thinned(most) for name in sorted(found)}


def _of_attempt(
    path: Path, wanted: Collection[str] | None, most: int
) -> tuple[set[str], dict[str, MetricSeries]] | None:
    names: set[str] = set()
    found: dict[str, MetricSeries] = {}
    with Folder.open(path) as folder:
        listed = folder.names()
        sizes = record_sizes(folder) | {name: _size(folder, name) for name in listed if _OF_RANKS.fullmatch(name)}
        lacking = {name: size for name, size in sizes.items() if _OF_RANKS.fullmatch(name)}
        for name in fnmatch.filter(listed, _FILES):
            with folder.reader(name) as file:
                line = file.readline(_LONGEST_HEAD)
                head = _CurveHead.model_validate_json(line)
                for source, size in head.sources.items():
                    if lacking.pop(source, None) != size:
                        return None
                for each, place in head.curves.items():
                    names.add(each)
                    if wanted is not None and each not in wanted:
                        continue
                    if (level := place.level(most)) is None or each in found:
                        return None
                    start, size = place.levels[level]
                    file.seek(len(line) + start)
                    curve = MetricSeries.model_validate_json(file.read(min(size, _MOST_BYTES)))
                    if not len(curve.step) == len(curve.time) == len(curve.value) > 0:
                        return None
                    found[each] = curve
    return None if any(lacking.values()) else (names, found)


def _size(folder: Folder, name: str) -> int:
    with folder.reader(name) as file:
        return file.seek(0, 2)


def _continued(before: MetricSeries, later: MetricSeries) -> MetricSeries:
    """Return the points of a curve; those of a later attempt replace the steps that it repeated."""
    low, high = later.step[0], later.step[-1]
    kept = [point for point in before.points() if not low <= point[0] <= high]
    return MetricSeries.of(sorted([*kept, *later.points()], key=lambda point: point[0]))
