"""Event streams as history: pages, types, the newest ones, gaps that the cap left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import redis as redis_py
from store_builders import World

from service.jobs.files import DataLayout
from service.jobs.records import Artifact, AttemptRef, PartOutcome, Rejected
from service.jobs.store import Store, StoreLimits
from service.jobs.store.keyspace import EVENT_BYTES, JOB_EVENTS
from service.jobs.store.tail import StreamTail


def logs(count: int, start: int = 0) -> list[Any]:
    return [
        {"type": "log", "time": float(number), "rank": 0, "stream": "stdout", "line": f"line {number}"}
        for number in range(start, start + count)
    ]


@pytest.fixture
def ref(store: Store, world: World) -> AttemptRef:
    """A running part whose stream holds the three states up to ``running``."""
    world.beat("a", cpu=1)
    (only,) = world.start(world.submit())
    return only


def walk(store: Store, job_id: str, types: set[str] | None, limit: int) -> Iterator[dict[str, Any]]:
    after = "0-0"
    while (page := store.events.page(job_id, after, types, limit)).items:
        yield from (stored.event for stored in page.items)
        after = page.next_after


def test_pages_follow_each_other_without_loss(store: Store, ref: AttemptRef) -> None:
    written = logs(25)
    store.attempts.emit(ref, written)
    assert list(walk(store, ref.job_id, {"log"}, limit=4)) == written
    assert [event["type"] for event in walk(store, ref.job_id, None, limit=7)] == ["state"] * 3 + ["log"] * 25


def test_a_page_without_matches_still_moves_on(store: Store, ref: AttemptRef) -> None:
    store.attempts.emit(ref, logs(5))
    page = store.events.page(ref.job_id, types={"bound"})
    assert page.items == []
    assert page.next_after == store.events.latest_id(ref.job_id)
    store.attempts.emit(ref, logs(1, 5))
    assert [stored.event["line"] for stored in store.events.page(ref.job_id, page.next_after).items] == ["line 5"]


def test_long_streams_are_read_in_chunks(store: Store, ref: AttemptRef, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.jobs.store.tail._CHUNK", 3)
    written = logs(20)
    store.attempts.emit(ref, written)
    assert list(walk(store, ref.job_id, {"log"}, limit=100)) == written
    assert [stored.event for stored in store.events.tail(ref.job_id, {"log"}, 8)] == written[-8:]


def test_tail_gives_the_newest_oldest_first(store: Store, ref: AttemptRef) -> None:
    store.attempts.emit(ref, logs(5))
    assert [stored.event["line"] for stored in store.events.tail(ref.job_id, None, 2)] == ["line 3", "line 4"]
    assert [stored.event["state"] for stored in store.events.tail(ref.job_id, {"state"}, 1)] == ["running"]
    assert store.events.tail(ref.job_id, {"bound"}, 5) == []


def test_a_batch_is_appended_once_however_often_it_is_sent(store: Store, ref: AttemptRef) -> None:
    for number, start in ((1, 0), (1, 0), (2, 3), (1, 0), (2, 3), (3, 6)):
        store.attempts.emit(ref, logs(3, start), batch=number)
    assert list(walk(store, ref.job_id, {"log"}, limit=100)) == logs(9)
    store.attempts.emit(ref, logs(1, 9))
    store.attempts.emit(ref, logs(1, 9))
    assert list(walk(store, ref.job_id, {"log"}, limit=100))[9:] == logs(1, 9) * 2


def test_the_next_attempt_counts_its_batches_anew(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    job = world.submit(retries=1)
    for attempt in range(2):
        (ref,) = world.start(job)
        store.attempts.emit(ref, logs(2, 2 * attempt), batch=1)
        store.attempts.finish(ref, PartOutcome("failed"))
    assert list(walk(store, job.id, {"log"}, limit=100)) == logs(4)
    store.jobs.delete(job.id)


def test_an_artifact_that_is_recorded_twice_has_one_event(store: Store, ref: AttemptRef) -> None:
    entry = Artifact(name="a.bin", bytes=1, sha256="0" * 64, media_type="x/y", created_at=datetime.now(UTC))
    for each in (entry, entry, entry.model_copy(update={"bytes": 2})):
        store.attempts.record_artifact(ref, each)
    assert [event["bytes"] for event in walk(store, ref.job_id, {"artifact"}, limit=10)] == [1, 2]


def test_a_job_without_events_has_an_empty_page(store: Store) -> None:
    page = store.events.page("job_" + "0" * 20)
    assert (page.items, page.next_after, page.gap) == ([], "0-0", False)
    assert store.events.latest_id("job_" + "0" * 20) == "0-0"


def test_the_cap_trims_and_the_page_says_so(broker: str, data: DataLayout, ref: AttemptRef) -> None:
    store = Store.connect(broker, data, StoreLimits(stream_cap=100))
    assert not store.events.page(ref.job_id).gap
    for start in range(0, 600, 100):
        store.attempts.emit(ref, logs(100, start))
    page = store.events.page(ref.job_id, limit=1000)
    assert page.gap
    assert page.items[-1].event["line"] == "line 599"
    assert len(page.items) < 400
    assert not store.events.page(ref.job_id, page.items[0].id).gap
    store.close()


def test_a_stream_has_no_more_bytes_than_it_may_and_the_page_says_so(
    broker: str, data: DataLayout, ref: AttemptRef, redis: redis_py.Redis
) -> None:
    store = Store.connect(broker, data, StoreLimits(stream_bytes=100_000, least_stream_bytes=10_000))
    line = [{**event, "line": "x" * 10_000} for event in logs(1)]
    for _ in range(30):
        store.attempts.emit(ref, line)
    page = store.events.page(ref.job_id, limit=1000)
    assert page.gap
    assert len(page.items) == 9
    assert 90_000 < int(redis.hget(EVENT_BYTES(), "default") or 0) < 100_000
    fewer = Store.connect(broker, data, StoreLimits(project_stream_bytes=50_000, least_stream_bytes=20_000))
    fewer.attempts.emit(ref, line)
    assert len(store.events.page(ref.job_id, limit=1000).items) == 4
    fewer.attempts.emit(ref, [{**line[0], "line": "x" * 200_000}])
    assert len(store.events.page(ref.job_id, limit=1000).items) == 1, "the newest one always stays"
    store.attempts.finish(ref, PartOutcome("succeeded", {}))
    store.jobs.delete(ref.job_id)
    assert redis.hget(EVENT_BYTES(), "default") is None
    store.close()
    fewer.close()


def test_a_page_of_long_events_is_short(store: Store, ref: AttemptRef, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.jobs.store.tail._PAGE_BYTES", 1000)
    written = [{**event, "line": "x" * 400} for event in logs(10)]
    store.attempts.emit(ref, written)
    assert len(store.events.page(ref.job_id, types={"log"}).items) == 3
    assert list(walk(store, ref.job_id, {"log"}, limit=1000)) == written


@pytest.mark.parametrize("after", ["", "yesterday", "1-2-3", "-1", "1-"])
def test_what_is_no_event_id_is_refused(store: Store, after: str) -> None:
    with pytest.raises(Rejected, match="after"):
        store.events.page("job_" + "0" * 20, after)


def test_the_live_tail_sees_what_the_scripts_write(
    broker: str, redis: redis_py.Redis, store: Store, ref: AttemptRef
) -> None:
    """The asynchronous reader and the scripts agree on keys, fields and encoding."""

    async def read() -> Any:
        tail = StreamTail.connect(broker)
        try:
            return await tail.read({ref.job_id: "0-0"}, count=10, most_bytes=1 << 20)
        finally:
            await tail.close()

    store.attempts.emit(ref, logs(1))
    found = asyncio.run(read())[ref.job_id].events
    assert [event.type for event in found] == ["state", "state", "state", "log"]
    assert found[-1].id == redis.xrevrange(JOB_EVENTS(ref.job_id), count=1)[0][0].decode()


def test_a_stream_of_everything_watches_a_bounded_number_of_queued_jobs(
    broker: str, store: Store, world: World, ref: AttemptRef
) -> None:
    """However many are queued; the active ones are always among them."""
    queued = [world.submit().id for _ in range(10)]

    async def recent() -> list[str]:
        tail = StreamTail.connect(broker)
        try:
            return (await tail.recent_jobs(3))[0]
        finally:
            await tail.close()

    assert set(asyncio.run(recent())) == {*queued[-3:], ref.job_id}
