"""How many reads of the broker streams over all jobs cost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack

import redis as redis_py

from api.frames import Cursor, Frame
from api.stream import Hub, HubSettings, Subscription
from service.jobs.store import Credential
from service.jobs.store.keyspace import JOB_EVENTS, JOBS
from service.jobs.store.tail import RawEvent, StreamTail

STREAMS, JOBS_AFTER = 5, 20
LIMIT_S = 60.0
KEY = Credential("key")


class CountingTail(StreamTail):
    """Counts the reads that subscriptions make for themselves."""

    own = 0

    async def read(
        self, cursors: Mapping[str, str], *, count: int, block_ms: int | None = None
    ) -> dict[str, list[RawEvent]]:
        self.own += block_ms is None
        return await super().read(cursors, count=count, block_ms=block_ms)


def add(redis: redis_py.Redis, job_id: str, number: int) -> None:
    redis.xadd(JOB_EVENTS(job_id), {"t": "log", "d": '{"type":"log"}'})
    redis.zadd(JOBS(), {job_id: number})


async def follow(broker: str, redis: redis_py.Redis) -> tuple[list[set[str]], int]:
    """Return the jobs that each stream showed, and how often streams read for themselves once all had joined."""
    tail = CountingTail.connect(broker)
    hub = Hub(tail, lambda _: set(), HubSettings(STREAMS, STREAMS, block_ms=20, discover_s=0.02))
    hub.start()
    with ExitStack() as opened:
        everything = (hub.subscribe(KEY, Cursor(), {"job_0"}, project=None, everything=True) for _ in range(STREAMS))
        streams = [opened.enter_context(each) for each in everything]
        for stream in streams:
            while not stream.joined:
                advance(stream, [frame for batch in await hub.catch_up(stream) for frame in batch.frames])
        before, shown = tail.own, [set[str]() for _ in streams]
        for number in range(1, JOBS_AFTER + 1):
            add(redis, f"job_{number}", number)
            await asyncio.sleep(0.03)
        async with asyncio.timeout(LIMIT_S):
            while not all(len(jobs) == JOBS_AFTER for jobs in shown):
                await asyncio.sleep(0.02)
                for jobs, stream in zip(shown, streams, strict=True):
                    taken = [frame for batch in stream.take() for frame in batch.frames]
                    advance(stream, taken)
                    jobs.update(frame.job_id for frame in taken)
        await hub.stop()
    return shown, tail.own - before


def advance(stream: Subscription, frames: list[Frame]) -> None:
    for frame in frames:
        stream.cursor.advance(frame)


def test_streams_over_all_jobs_learn_of_new_ones_without_a_read_of_their_own(
    broker: str, redis: redis_py.Redis
) -> None:
    add(redis, "job_0", 0)
    shown, own = asyncio.run(follow(broker, redis))
    assert shown == [{f"job_{number}" for number in range(1, JOBS_AFTER + 1)}] * STREAMS
    assert own == 0
