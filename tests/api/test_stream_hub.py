"""How many reads of the broker streams over all jobs cost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import redis as redis_py

from api.streams import Cursor, Hub, HubSettings
from api.streams.frames import Form, batches
from service.jobs.store import Credential
from service.jobs.store.keyspace import JOB_EVENTS, JOBS
from service.jobs.store.tail import ReadEvents, StreamTail, parse_id

STREAMS, JOBS_AFTER = 5, 20
LIMIT_S = 60.0
KEY = Credential("key")


class CountingTail(StreamTail):
    """Counts the reads that subscriptions make for themselves."""

    own = 0

    async def read(
        self, cursors: Mapping[str, str], *, count: int, most_bytes: int, block_ms: int | None = None
    ) -> dict[str, ReadEvents]:
        self.own += block_ms is None
        return await super().read(cursors, count=count, most_bytes=most_bytes, block_ms=block_ms)


def add(redis: redis_py.Redis, job_id: str, number: int) -> None:
    redis.xadd(JOB_EVENTS(job_id), {"t": "log", "d": '{"type":"log"}'})
    redis.zadd(JOBS(), {job_id: number})


async def follow(broker: str, redis: redis_py.Redis) -> tuple[list[set[str]], int]:
    """Return the jobs that each stream showed, and how often streams read for themselves once all had joined."""
    tail = CountingTail.connect(broker)
    hub = Hub(tail, lambda _: set(), HubSettings(STREAMS, STREAMS, block_ms=20, discover_s=0.02))
    hub.start()
    with ExitStack() as opened:
        form = Form(composite=True)
        everything = (hub.subscribe(KEY, Cursor(), {}, form, project=None, everything=True) for _ in range(STREAMS))
        streams = [opened.enter_context(each) for each in everything]
        for stream in streams:
            while not stream.joined:
                await hub.catch_up(stream)
        before, shown = tail.own, [set[str]() for _ in streams]
        for number in range(1, JOBS_AFTER + 1):
            add(redis, f"job_{number}", number)
            await asyncio.sleep(0.03)
        async with asyncio.timeout(LIMIT_S):
            while not all(len(jobs) == JOBS_AFTER + 1 for jobs in shown):
                await asyncio.sleep(0.02)
                for jobs, stream in zip(shown, streams, strict=True):
                    jobs.update(shown_jobs(stream.take()))
        await hub.stop()
    return shown, tail.own - before


def shown_jobs(content: bytes) -> list[str]:
    return re.findall(r'"job":"(\w+)"', content.decode())


def test_streams_over_all_jobs_learn_of_new_ones_without_a_read_of_their_own(
    broker: str, redis: redis_py.Redis
) -> None:
    add(redis, "job_0", 0)
    shown, own = asyncio.run(follow(broker, redis))
    assert shown == [{f"job_{number}" for number in range(JOBS_AFTER + 1)}] * STREAMS
    assert own == 0


async def resumed_beside_another(broker: str, redis: redis_py.Redis) -> tuple[int, list[str]]:
    """Return how often a stream read for itself that came back to a job on which nothing happened since, while another
    one follows it, and what it showed.
    """
    tail = CountingTail.connect(broker)
    hub = Hub(tail, lambda _: set(), HubSettings(2, 2, block_ms=20, discover_s=0.02))
    hub.start()
    form, states = Form(composite=False), {"job_0": "running"}
    with (
        hub.subscribe(KEY, Cursor(base="9-0"), states, form, project=None) as other,
        hub.subscribe(KEY, Cursor(base="5-0"), states, form, project=None) as resumed,
    ):
        while not other.joined:
            await hub.catch_up(other)
        before, seen = tail.own, b""
        async with asyncio.timeout(LIMIT_S):
            while not resumed.joined:
                seen += await hub.catch_up(resumed)
            own = tail.own - before
            redis.xadd(JOB_EVENTS("job_0"), {"t": "log", "d": '{"type":"log"}'}, id="12-0")
            while b"id: 12-0" not in seen:
                await asyncio.sleep(0.01)
                seen += resumed.take()
        await hub.stop()
    return own, re.findall(r"id: (\S+)", seen.decode())


def test_a_stream_that_resumes_before_the_position_of_another_joins_it(broker: str, redis: redis_py.Redis) -> None:
    for at in ("3-0", "7-0"):
        redis.xadd(JOB_EVENTS("job_0"), {"t": "log", "d": '{"type":"log"}'}, id=at)
    own, seen = asyncio.run(resumed_beside_another(broker, redis))
    assert own == 1
    assert seen == ["7-0", "12-0"]


def added(redis: redis_py.Redis, job_id: str) -> str:
    """Return the id of an event that is new."""
    redis.xadd(JOB_EVENTS(job_id), {"t": "log", "d": '{"type":"log"}'})
    found: Any = redis.xrevrange(JOB_EVENTS(job_id), count=1)
    return str(found[0][0].decode())


class ShortSightedTail(StreamTail):
    """Sees no more new jobs once it is told so, as between two looks for them."""

    is_blind = False
    _seen: tuple[list[str], int]

    async def recent_jobs(self, count: int, project: str | None = None) -> tuple[list[str], int]:
        if not self.is_blind:
            self._seen = await super().recent_jobs(count, project)
        return self._seen


async def cut_before_a_new_job_is_known(broker: str, redis: redis_py.Redis) -> list[str]:
    """Return the ids of events that a stream over all jobs shows which ended before it learnt of a new job, though it
    had shown a later event of another one, and was resumed there.
    """
    tail, form, settings = ShortSightedTail.connect(broker), Form(composite=True), HubSettings(2, 2, block_ms=20)
    hub = Hub(tail, lambda _: set(), replace(settings, discover_s=0.02))
    hub.start()
    with hub.subscribe(KEY, Cursor(base=await tail.now()), {}, form, project=None, everything=True) as stream:
        async with asyncio.timeout(LIMIT_S):
            while stream not in stream.feed.in_step or "job_0" not in stream.jobs:
                await (asyncio.sleep(0.01) if stream.joined else hub.catch_up(stream))
            tail.is_blind = True
            await asyncio.sleep(0.05)
            add(redis, "job_1", 1)
            await asyncio.sleep(0.01)
            later = added(redis, "job_0")
            while f'"id":"{later}"'.encode() not in (shown := stream.take()):
                await asyncio.sleep(0.01)
        token = re.findall(r"^id: (.+)$", shown.decode(), re.MULTILINE)[-1]
        tail.is_blind = False
    with hub.subscribe(KEY, Cursor.resume(token), {}, form, project=None, everything=True) as stream:
        seen = b""
        async with asyncio.timeout(LIMIT_S):
            while not stream.joined:
                seen += await hub.catch_up(stream)
            last = added(redis, "job_0")
            while last.encode() not in seen:
                await asyncio.sleep(0.01)
                seen += stream.take()
    await hub.stop()
    return re.findall(r'"job":"(\w+)"', seen.decode())


def test_a_stream_over_all_jobs_that_is_resumed_lacks_nothing_of_a_job_that_was_new(
    broker: str, redis: redis_py.Redis
) -> None:
    add(redis, "job_0", 0)
    assert asyncio.run(cut_before_a_new_job_is_known(broker, redis)) == ["job_1", "job_0"]


async def shared(broker: str, redis: redis_py.Redis) -> list[bytes]:
    """Return what each stream was handed of one event, once all are in step."""
    hub = Hub(StreamTail.connect(broker), lambda _: set(), HubSettings(STREAMS, STREAMS, block_ms=20, discover_s=0.02))
    hub.start()
    form = Form(composite=True)
    with ExitStack() as opened:
        streams = [
            opened.enter_context(hub.subscribe(KEY, Cursor(), {}, form, project=None, everything=True))
            for _ in range(STREAMS)
        ]
        async with asyncio.timeout(LIMIT_S):
            for stream in streams:
                while not stream.joined:
                    await hub.catch_up(stream)
            while not all(stream in stream.feed.in_step for stream in streams):
                await asyncio.sleep(0.01)
            before = [stream.take() for stream in streams]
            assert all(b'"job":"job_0"' in each for each in before)
            add(redis, "job_0", 0)
            while not all(stream.wake.is_set() for stream in streams):
                await asyncio.sleep(0.01)
        handed = [stream.take() for stream in streams]
        await hub.stop()
    return handed


def test_streams_over_the_same_jobs_are_handed_the_same_bytes(broker: str, redis: redis_py.Redis) -> None:
    add(redis, "job_0", 0)
    handed = asyncio.run(shared(broker, redis))
    assert b'"job":"job_0"' in handed[0]
    assert all(each is handed[0] for each in handed)


def test_events_that_could_not_be_handed_out_are_read_by_the_stream_itself(
    broker: str, redis: redis_py.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise ValueError("a defect")

    async def watch() -> None:
        hub, seen = Hub(StreamTail.connect(broker), lambda _: set(), HubSettings(1, 1, block_ms=20)), b""
        hub.start()
        with hub.subscribe(KEY, Cursor(), {"job_0": "running"}, Form(composite=False), project=None) as stream:
            async with asyncio.timeout(LIMIT_S):
                while not stream.joined:
                    await hub.catch_up(stream)
                monkeypatch.setattr(hub, "_hand_out", fail)
                last = added(redis, "job_0")
                while stream.joined:
                    await asyncio.sleep(0.01)
                while last.encode() not in seen:
                    seen += await hub.catch_up(stream)
        await hub.stop()

    asyncio.run(watch())


def test_a_read_ends_at_its_bytes_and_the_next_ones_go_on_in_order(broker: str, redis: redis_py.Redis) -> None:
    """However many jobs have long events, a read has so many bytes of them all, and one event more."""
    ids, size, most = [f"job_{number}" for number in range(5)], 10_000, 25_000
    written = [redis.xadd(JOB_EVENTS(each), {"t": "log", "d": "x" * size}).decode() for _ in range(4) for each in ids]

    async def read_all() -> list[str]:
        tail, cursor, seen = StreamTail.connect(broker), Cursor(), list[str]()
        while found := await tail.read({each: cursor.of(each) for each in ids}, count=3, most_bytes=most):
            assert sum(len(event.payload) for each in found.values() for event in each.events) <= most + size
            taken = cursor.take(batches(found))
            assert taken is not None, "each read gets further"
            seen += [frame.id for frame in taken.frames]
        await tail.close()
        return seen

    assert sorted(asyncio.run(read_all()), key=parse_id) == sorted(written, key=parse_id)
