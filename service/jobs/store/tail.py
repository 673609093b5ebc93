"""Reads a job's event stream: as history, and live for the API's streams.

Live reads have a connection of their own without a socket timeout: a blocking read may wait for any time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import orjson
import redis.asyncio as redis
from redis.exceptions import NoScriptError

from service.jobs.records import Problem, Rejected
from service.jobs.spec.common import ACTIVE
from service.jobs.store import stubs
from service.jobs.store.client import BrokerClient, translated
from service.jobs.store.keyspace import JOB_EVENTS, JOBS, JOBS_BY
from service.jobs.store.outage import BrokerOutage, PatientAsyncPool
from service.jobs.store.scripts import Script

BEGINNING = "0-0"
LARGEST_ID_PART = 2**64 - 1
"""Redis keeps both parts of an id in 64 bits."""
_ID = re.compile(r"(\d{1,20})(?:-(\d{0,20}))?", re.ASCII)
_MAX_CONNECTIONS = 32
"""The most connections, however many subscribers catch up at once."""


@dataclass(frozen=True)
class RawEvent:
    """An event as stored in the stream: its position, its type, and its JSON text, not parsed."""

    job_id: str
    id: str
    type: str
    payload: bytes

    @property
    def position(self) -> tuple[int, int]:
        return parse_id(self.id)


def parse_id(text: str) -> tuple[int, int]:
    """Return ``(milliseconds, sequence)`` of a stream id. Raises ``ValueError``."""
    match = _ID.fullmatch(text)
    milliseconds, sequence = (int(each or 0) for each in match.groups()) if match else (LARGEST_ID_PART + 1, 0)
    if max(milliseconds, sequence) > LARGEST_ID_PART:
        raise ValueError(f"{text[:60]!r} is not an event id; ids look like 1700000000000-0")
    return milliseconds, sequence


@dataclass(frozen=True)
class ReadEvents:
    """What was read of one job's stream. If there is more, the next event lies at ``more_from`` or later, in ms."""

    events: tuple[RawEvent, ...]
    more_from: int | None


class StreamTail:
    """Reads many jobs' streams at once."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    @classmethod
    def connect(cls, url: str, *, outage_s: float = 0.0) -> Self:
        """Return a reader; a broker that takes no connection is waited for until ``outage_s`` after it went away."""
        pool = PatientAsyncPool.from_url(
            url, max_connections=_MAX_CONNECTIONS, timeout=None, socket_timeout=None, socket_connect_timeout=5.0
        )
        pool.outage = BrokerOutage(outage_s)
        return cls(redis.Redis.from_pool(pool))

    async def read(
        self, cursors: Mapping[str, str], *, count: int, most_bytes: int, block_ms: int | None = None
    ) -> dict[str, ReadEvents]:
        """Return events after each job's cursor, at most ``count`` per job and about ``most_bytes`` of all; waits up
        to ``block_ms`` when there are none.
        """
        if not cursors:
            return {}
        words: list[str | int] = [count, most_bytes, *chain.from_iterable(cursors.items())]
        streams: dict[Any, Any] = {JOB_EVENTS(job_id): cursor for job_id, cursor in cursors.items()}
        with translated():
            rows = await self._script(stubs.read_events, words)
            if not rows and block_ms is not None and await self._client.xread(streams, count=1, block=block_ms):
                rows = await self._script(stubs.read_events, words)
        return dict(map(_read_events, rows))

    async def _script(self, script: Script[..., Any], words: Sequence[str | int]) -> Any:
        try:
            return await self._client.evalsha(script.sha, 0, *words)
        except NoScriptError:
            return await self._client.eval(script.text, 0, *words)

    async def first_after_gap(self, job_id: str, after: str) -> str | None:
        """Return the first id that is left, if the cap has removed events that may lie after ``after``; else
        ``None``.
        """
        try:
            with translated():
                info: Any = await self._client.xinfo_stream(JOB_EVENTS(job_id))
        except redis.ResponseError:
            return None
        first = info["first-entry"]
        if first is None or info["entries-added"] <= info["length"]:
            return None
        oldest = first[0].decode()
        return oldest if parse_id(after) < parse_id(oldest) else None

    async def last_id(self, job_id: str) -> str | None:
        """Return the position of the newest event."""
        with translated():
            newest: Any = await self._client.xrevrange(JOB_EVENTS(job_id), count=1)
        return newest[0][0].decode() if newest else None

    async def recent_jobs(self, count: int, project: str | None = None) -> tuple[list[str], int]:
        """Return the newest ``count`` jobs, the newest ``count`` queued ones, and every active one (no more
        than there are devices): of all, or of a ``project``, whose newest are those that its members may read.
        Also return the time, in ms by the broker's clock: no job that had begun by then is missing.
        """
        own = "" if project is None else f":{project}"
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.time()
            pipeline.zrevrange(JOBS() if project is None else JOBS_BY(f"visible{own}"), 0, count - 1)
            pipeline.zrevrange(JOBS_BY(f"state:queued{own}"), 0, count - 1)
            for state in sorted(ACTIVE):
                pipeline.zrevrange(JOBS_BY(f"state:{state}{own}"), 0, -1)
            with translated():
                (seconds, microseconds), *answers = await pipeline.execute()
        jobs = list(dict.fromkeys(job_id.decode() for answer in answers for job_id in answer))
        return jobs, seconds * 1000 + microseconds // 1000

    async def first_ids(self, job_ids: Collection[str]) -> dict[str, str]:
        """Return the id of the first event of each job that has any."""
        ids = list(job_ids)
        async with self._client.pipeline(transaction=False) as pipeline:
            for job_id in ids:
                pipeline.xrange(JOB_EVENTS(job_id), count=1)
            with translated():
                answers: list[Any] = await pipeline.execute()
        return {job_id: found[0][0].decode() for job_id, found in zip(ids, answers, strict=True) if found}

    async def visible_among(self, project: str, job_ids: Collection[str]) -> set[str]:
        """Return the jobs that the members of a project may read, out of these."""
        ids = list(job_ids)
        if not ids:
            return set()
        with translated():
            scores: list[float | None] = await self._client.zmscore(JOBS_BY(f"visible:{project}"), ids)
        return {job_id for job_id, score in zip(ids, scores, strict=True) if score is not None}

    async def now(self) -> str:
        """Return a cursor at the current time of the broker's clock."""
        with translated():
            seconds, microseconds = await self._client.time()
        return f"{seconds * 1000 + microseconds // 1000}-0"

    async def close(self) -> None:
        await self._client.aclose()


def _read_events(row: Sequence[Any]) -> tuple[str, ReadEvents]:
    job_id, more_from, *pieces = row
    name = job_id.decode()
    events = tuple(
        RawEvent(name, entry.decode(), fields[1].decode(), fields[3]) for piece in pieces for entry, fields in piece
    )
    return name, ReadEvents(events, parse_id(more_from.decode())[0] if more_from else None)


_CHUNK, _FIRST_CHUNK, _CHUNK_BYTES = 1000, 64, 1 << 20
"""The most entries of one read, those of the first one, and about the bytes of a later one."""
_PAGE_BYTES = 8 << 20
"""Bytes of events after which a page takes no more of them."""


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
        """Return up to ``limit`` events of ``types`` (all when absent) after an id, fewer if they are long."""
        items: list[StoredEvent] = []
        last = _checked_id(after)
        gap = self._has_gap(job_id, after)
        size = 0
        for stream_id, kind, text in self._entries("XRANGE", job_id, after, "+"):
            if len(items) == limit or size > _PAGE_BYTES:
                break
            last = stream_id
            if types is None or kind in types:
                items.append(StoredEvent(stream_id, orjson.loads(text)))
                size += len(text)
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
        count = _FIRST_CHUNK
        while chunk := self.client.call(command, JOB_EVENTS(job_id), start, end, "COUNT", count):
            for stream_id, fields in chunk:
                yield stream_id, fields["t"], fields["d"]
            start = f"({chunk[-1][0]}"
            mean = sum(len(fields["d"]) for _, fields in chunk) // len(chunk) + 1
            count = min(max(_CHUNK_BYTES // mean, 1), _CHUNK)

    def _has_gap(self, job_id: str, after: str) -> bool:
        """Return whether entries after ``after`` may have been trimmed."""
        if not self.client.call("EXISTS", JOB_EVENTS(job_id)):
            return False
        info = self.client.call("XINFO STREAM", JOB_EVENTS(job_id))
        trimmed = info["entries-added"] > info["length"]
        first = info["first-entry"]
        return bool(trimmed and first and parse_id(after) < parse_id(first[0]))
