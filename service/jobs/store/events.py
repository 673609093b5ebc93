"""Reads a job's event stream as history; live reading is in :mod:`service.jobs.store.tail`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from service.jobs.records import Problem, Rejected
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import JOB_EVENTS
from service.jobs.store.tail import BEGINNING, parse_id

_CHUNK = 1000


@dataclass(frozen=True)
class StoredEvent:
    """An event with its place in the stream; ids grow and are never used twice."""

    id: str
    event: dict[str, Any]


@dataclass(frozen=True)
class EventPage:
    """Events after some id, oldest first. ``next_after`` continues; ``gap``: some between were trimmed by the cap."""

    items: list[StoredEvent]
    next_after: str
    gap: bool


def _checked_id(stream_id: str) -> str:
    """Return the id if it is one; raise :class:`Rejected` otherwise."""
    with suppress(ValueError):
        if not stream_id.endswith("-"):
            parse_id(stream_id)
            return stream_id
    raise Rejected([Problem("after", "not an event id", stream_id, "an id such as 1763700000000-0, or 0-0")])


@dataclass(frozen=True)
class Events:
    """Streams by job id. A job that does not exist has an empty one."""

    client: BrokerClient

    def page(
        self, job_id: str, after: str = BEGINNING, types: Collection[str] | None = None, limit: int = 500
    ) -> EventPage:
        """Return up to ``limit`` events of ``types`` (all when absent) after an id."""
        items: list[StoredEvent] = []
        last = _checked_id(after)
        gap = self._has_gap(job_id, after)
        for stream_id, kind, text in self._entries("XRANGE", job_id, after, "+"):
            if len(items) == limit:
                break
            last = stream_id
            if types is None or kind in types:
                items.append(StoredEvent(stream_id, orjson.loads(text)))
        return EventPage(items, last, gap)

    def latest_id(self, job_id: str) -> str:
        """Return the id of the newest event; ``0-0`` of an empty stream."""
        newest = self.client.call("XREVRANGE", JOB_EVENTS(job_id), "+", "-", "COUNT", 1)
        return str(newest[0][0]) if newest else BEGINNING

    def tail(self, job_id: str, types: Collection[str] | None, count: int) -> list[StoredEvent]:
        """Return the newest ``count`` events of ``types``, oldest first."""
        found: list[StoredEvent] = []
        for stream_id, kind, text in self._entries("XREVRANGE", job_id, "+", "-"):
            if len(found) == count:
                break
            if types is None or kind in types:
                found.append(StoredEvent(stream_id, orjson.loads(text)))
        return found[::-1]

    def _entries(self, command: str, job_id: str, start: str, end: str) -> Iterator[tuple[str, str, str]]:
        """Yield (id, type, JSON) of entries, chunk by chunk; ``start`` itself is left out unless it is an open end."""
        start = start if start == "+" else f"({start}"
        while chunk := self.client.call(command, JOB_EVENTS(job_id), start, end, "COUNT", _CHUNK):
            for stream_id, fields in chunk:
                yield stream_id, fields["t"], fields["d"]
            start = f"({chunk[-1][0]}"

    def _has_gap(self, job_id: str, after: str) -> bool:
        """Return whether entries after ``after`` may have been trimmed."""
        if not self.client.call("EXISTS", JOB_EVENTS(job_id)):
            return False
        info = self.client.call("XINFO STREAM", JOB_EVENTS(job_id))
        trimmed = info["entries-added"] > info["length"]
        first = info["first-entry"]
        return bool(trimmed and first and parse_id(after) < parse_id(first[0]))
