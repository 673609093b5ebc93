"""Decides what a target is sent of a job, live and at its end, so that it has each point once.

A point is a metric's value at a step. Live, only later steps than those that a target has are sent. At the end what was
sent is compared with the whole record; where it differs (a later attempt took other values, or events were lost to the
cap of their stream), the export begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from zlib import crc32

from api.exports.base import ExportedJob, Exporter, RunGoneError
from api.exports.server import ExportServer
from api.routes.metrics import Points, collect

_EVENTS = 2000
"""Most events of one page; a round sends one page."""
_METRIC = frozenset({"metric"})


@dataclass(frozen=True)
class SentSeries:
    """What a target has of one metric: up to which step, how many points, and a checksum of steps and values."""

    last: int
    count: int
    checksum: int

    def with_points(self, points: Points) -> SentSeries:
        """Return what the target has once it got these points."""
        checksum = self.checksum
        for step in sorted(points):
            checksum = crc32(f"{step}:{points[step][1]!r};".encode(), checksum)
        return SentSeries(max(points, default=self.last), self.count + len(points), checksum)


_NOTHING = SentSeries(-(2**63), 0, 0)


@dataclass(frozen=True)
class Sent:
    """What a target has of a job: the exporter's mark, the position in the job's events, and the series by metric."""

    mark: str
    after: str
    series: Mapping[str, SentSeries] = field(default_factory=dict)

    @classmethod
    def parse(cls, kept: Mapping[str, Any]) -> Sent:
        """Return what :meth:`plain` gave."""
        series = {name: SentSeries(*numbers) for name, numbers in kept["series"].items()}
        return cls(kept["mark"], kept["after"], series)

    def plain(self) -> dict[str, Any]:
        series = {name: list(asdict(each).values()) for name, each in self.series.items()}
        return {"mark": self.mark, "after": self.after, "series": series}

    def later(self, found: Mapping[str, Points]) -> dict[str, Points]:
        """Return the points at later steps than the target has of each metric."""
        fresh = {
            name: {step: point for step, point in points.items() if step > self.series.get(name, _NOTHING).last}
            for name, points in found.items()
        }
        return {name: points for name, points in fresh.items() if points}

    def agrees(self, whole: Mapping[str, Points]) -> bool:
        """Return whether what the target has is the beginning of the whole record."""
        return all(
            _NOTHING.with_points({step: point for step, point in whole.get(name, {}).items() if step <= sent.last})
            == sent
            for name, sent in self.series.items()
        )


def follow(exporter: Exporter, told: ExportedJob, server: ExportServer | None, sent: Sent | None) -> Sent:
    """Send what is new of a job that goes on; return what the target has then."""
    if sent is not None:
        page = told.store.events.page(told.job.id, after=sent.after, types=_METRIC, limit=_EVENTS)
        found = collect((each.event for each in page.items), None)
        try:
            return _send(exporter, told, server, Sent(sent.mark, page.next_after, sent.series), found)
        except RunGoneError:
            pass
    after = told.store.events.latest_id(told.job.id)
    return _send(exporter, told, server, Sent(exporter.begin(told, server), after), told.metrics)


def finish(exporter: Exporter, told: ExportedJob, server: ExportServer | None, sent: Sent | None) -> str:
    """Send all that a target lacks of an ended job; return where the job can be seen."""
    if sent is not None and sent.agrees(told.metrics):
        try:
            return exporter.end(told, server, _send(exporter, told, server, sent, told.metrics).mark)
        except RunGoneError:
            pass
    begun = Sent(exporter.begin(told, server), "")
    return exporter.end(told, server, _send(exporter, told, server, begun, told.metrics).mark)


def _send(
    exporter: Exporter, told: ExportedJob, server: ExportServer | None, sent: Sent, found: Mapping[str, Points]
) -> Sent:
    fresh = sent.later(found)
    series = {name: sent.series.get(name, _NOTHING).with_points(points) for name, points in fresh.items()}
    return Sent(exporter.send(told, server, sent.mark, fresh), sent.after, {**sent.series, **series})
