"""The queue as it is read: places, reasons, estimates, pages."""

from __future__ import annotations

from typing import Any

import pytest
import redis as redis_py
from store_builders import DONE, World, train

import service.jobs.store.queue as store_queue
from service.jobs.records import QueueLine, Rejected
from service.jobs.records.hosts import Overcommitment
from service.jobs.store import HostReport, Store
from service.jobs.store.keyspace import HOST, JOB


def lines(store: Store, **options: Any) -> dict[str, QueueLine]:
    return {line.job: line for line in store.queue.page(**options).items}


def test_places_follow_the_order_of_placement(store: Store, world: World) -> None:
    old, urgent, young = world.submit(), world.submit(priority=5), world.submit()
    after = world.submit(after=[old.id])
    page = store.queue.page()
    assert [(line.job, line.place) for line in page.items] == [
        (urgent.id, 1), (old.id, 2), (young.id, 3), (after.id, None),
    ]  # fmt: skip
    assert (page.pending, page.dependent, page.next_cursor) == (3, 1, None)
    assert page.items[-1].reason == f"waits for {old.id}"


def test_the_place_is_that_in_which_jobs_are_placed(store: Store, world: World) -> None:
    jobs = [world.submit(priority=index % 3) for index in range(9)]
    listed = [line.job for line in store.queue.page().items]
    world.beat("a", cpu=9)
    assert store.attempts.place() == listed
    assert set(listed) == {job.id for job in jobs}


def test_own_jobs_have_their_true_places_behind_others(store: Store, world: World) -> None:
    for _ in range(5):
        world.submit()
    mine, _ = store.jobs.submit(train(), "bob")
    assert [(line.job, line.place) for line in store.queue.page(owner="bob").items] == [(mine.id, 6)]
    assert lines(store, job_id=mine.id)[mine.id].place == 6
    seen = store.queue.page(may_see=lambda job: job.owner == "bob")
    assert [line.place for line in seen.items] == [6]


def test_pages_hold_each_job_once(store: Store, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_queue, "_PIECE", 2)
    jobs = [world.submit() for _ in range(5)]
    found, cursor = list[str](), None
    while True:
        page = store.queue.page(2, cursor)
        found += [line.job for line in page.items]
        if (cursor := page.next_cursor) is None:
            break
    assert found == [job.id for job in jobs]


@pytest.mark.parametrize("cursor", ["", "-1", "x", "9" * 30, "٣"])
def test_what_is_no_cursor_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(Rejected, match="not a cursor of the queue"):
        store.queue.page(1, cursor)


def test_a_long_queue_is_read_once_for_many_readers(
    store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = world.submit(), world.submit()
    monkeypatch.setattr(store_queue, "_FEW", 1)
    monkeypatch.setattr(store_queue, "_KEPT_FOR", 1e9)
    snapshot = store.queue.snapshot()
    store.jobs.cancel(first.id)
    assert store.queue.snapshot() is snapshot
    assert [line.job for line in store.queue.page().items] == [second.id]


def test_a_job_waits_for_the_time_limit_of_what_runs(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    world.start(world.submit(timeout_s=3600))
    waiting = world.submit()
    world.pass_time(600)
    line = lines(store)[waiting.id]
    assert line.start is not None
    assert line.start.rests_on == ("limits",)
    taken = store.queue.snapshot().taken_at
    assert 2900 < (line.start.at - taken).total_seconds() <= 3000


def test_an_end_beyond_all_dates_is_no_estimate(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    world.start(world.submit(timeout_s=1e300))
    waiting = world.submit()
    assert lines(store)[waiting.id].start is None


def test_a_job_waits_for_an_unknown_time_until_earlier_jobs_tell(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    for number in range(4):
        job = world.submit()
        (ref,) = world.start(job)
        waiting = world.submit()
        assert (lines(store)[waiting.id].start is None) == (number < 3)
        store.jobs.cancel(waiting.id)
        store.attempts.finish(ref, DONE)
        world.redis.hincrby(JOB(job.id), "started_at", -1_000_000)
    world.start(world.submit())
    waiting = world.submit()
    estimate = lines(store)[waiting.id].start
    assert estimate is not None
    assert estimate.rests_on == ("durations",)
    assert 900 < (estimate.at - store.queue.snapshot().taken_at).total_seconds() <= 1001


def test_failing_and_drained_hosts_are_named(store: Store, redis: redis_py.Redis, world: World) -> None:
    for name in "abcde":
        world.beat(name, cpu=1)
    redis.hset(HOST("a"), "retry_at", 2**50)
    store.hosts.drain("b")
    waiting = world.submit(2)
    store.attempts.place()
    reason = lines(store)[waiting.id].reason
    assert reason is not None
    assert "even when idle (host a does not start jobs, host b is draining)" in reason
    for name in "cde":
        store.hosts.drain(name)
    store.attempts.place()
    reason = lines(store)[waiting.id].reason
    assert reason is not None
    assert "(host a does not start jobs, host b is draining, host c is draining and 2 more like these)" in reason


def test_a_quota_does_not_hide_that_the_host_is_drained_and_a_busy_host_is_named(store: Store, world: World) -> None:
    too_much = Overcommitment(load=9.0, cores=2, by=())
    store.hosts.beat(HostReport("a", "a.example", (), 2, {"trivet": "0"}, overcommitted=too_much))
    world.start(world.submit(2))
    waiting = world.submit()
    store.attempts.place()
    assert lines(store)[waiting.id].reason == "waits for 1 free cpu device (host a is overcommitted)"
    store.projects.change("default", {"devices": 2})
    store.hosts.drain("a")
    store.attempts.place()
    reason = lines(store)[waiting.id].reason
    assert reason == "project default uses 2 of 2 devices, and this job needs 1; host a is draining"


def test_a_change_is_heard_of_by_one_agent_that_waits(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    while store.attempts.wait_for_news(0.01):
        pass
    world.submit()
    world.submit()
    assert store.attempts.wait_for_news(0.01)
    assert not store.attempts.wait_for_news(0.01)
