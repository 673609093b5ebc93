"""What the scripts count as jobs come and go, and what is measured of the queue, the fleet and the broker."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import redis as redis_py
from store_builders import World

from service.jobs.monitoring.numbers import Meter, Series
from service.jobs.records import JobError, PartOutcome
from service.jobs.store import HostReport, Store


def value(store: Store, name: str, **labels: str) -> float:
    return store.gauges.numbers()[Series(name, tuple(labels.items()))]


def test_attempts_are_counted_by_outcome_and_cause(store: Store, world: World) -> None:
    world.beat("a", cpu=4)
    for outcome in (
        PartOutcome("succeeded", result={}),
        PartOutcome("failed", error=JobError(type="RankDied", message="it died")),
        PartOutcome("failed", error=JobError(type="MyOwnError", message="it broke")),
    ):
        store.attempts.finish(world.start(world.submit())[0], outcome)
    ended = "trivet_attempts_ended_total"
    assert value(store, ended, outcome="succeeded", cause="None") == 1
    assert value(store, ended, outcome="failed", cause="RankDied") == 1
    assert value(store, ended, outcome="failed", cause="Other") == 1
    assert value(store, "trivet_jobs_ended_total", kind="train", state="failed") == 2
    assert value(store, "trivet_jobs_submitted_total", kind="train") == 3
    assert value(store, "trivet_attempts_placed_total") == 3
    assert value(store, "trivet_attempts_started_total") == 3
    assert value(store, "trivet_queue_time_seconds_count") == 3
    assert value(store, "trivet_start_seconds_count") == 3
    assert 0 <= value(store, "trivet_start_seconds_sum") < 60


def test_a_lease_that_runs_out_is_counted_once(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    world.expire(world.start(world.submit())[0])
    store.attempts.reap()
    store.attempts.reap()
    assert value(store, "trivet_lease_expiries_total") == 1
    assert value(store, "trivet_attempts_ended_total", outcome="lost", cause="LeaseLost") == 1
    assert value(store, "trivet_host_devices", host="a", pool="cpu", state="lost") == 1


def test_dispatches_and_their_retries(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    world.submit()
    store.attempts.place()
    assert len(store.attempts.due()) == 1
    assert value(store, "trivet_dispatches_total") == 1
    assert value(store, "trivet_dispatch_retries_total") == 0
    world.pass_time(store.attempts.limits.redispatch_s + 1)
    assert len(store.attempts.due()) == 1
    assert value(store, "trivet_dispatches_total") == 2
    assert value(store, "trivet_dispatch_retries_total") == 1
    assert value(store, "trivet_outbox_parts") == 1
    assert value(store, "trivet_outbox_oldest_seconds") >= store.attempts.limits.redispatch_s


def test_the_queue_by_the_device_asked_for(store: Store, world: World) -> None:
    world.submit(2, priority=3)
    world.submit(2)
    world.pass_time(100)
    world.submit(1)
    world.submit(1, device="cuda")
    assert value(store, "trivet_pending_jobs", device="auto") == 3
    assert value(store, "trivet_pending_jobs", device="cuda") == 1
    assert value(store, "trivet_pending_jobs", device="cpu") == 0
    assert value(store, "trivet_pending_oldest_seconds", device="auto") >= 100
    assert value(store, "trivet_pending_oldest_seconds", device="cuda") < 100
    assert value(store, "trivet_active_jobs", kind="train", state="queued") == 4


def test_the_clock_of_a_host_is_compared_with_the_brokers(
    store: Store, redis: redis_py.Redis, monkeypatch: Any
) -> None:
    ahead = int(redis.time()[0]) + 3600
    monkeypatch.setattr("service.jobs.store.hosts.time.time", lambda: ahead)
    store.hosts.beat(HostReport("a", "127.0.0.1", cpu_slots=1))
    monkeypatch.undo()
    assert 3000 < value(store, "trivet_host_clock_skew_seconds", host="a") < 4000
    assert 0 <= value(store, "trivet_host_heartbeat_age_seconds", host="a") < 60


def test_counts_of_processes_are_added(store: Store) -> None:
    for _ in range(2):
        meter = Meter()
        meter.observe("trivet_placement_seconds", 0.004)
        store.counts.add(meter)
    numbers = store.gauges.numbers()
    assert numbers[Series("trivet_placement_seconds_bucket", (("le", "0.005"),))] == 2
    assert numbers[Series("trivet_placement_seconds_bucket", (("le", "0.0025"),))] == 0
    assert abs(numbers[Series("trivet_placement_seconds_sum")] - 0.008) < 1e-9


def test_the_broker_tells_of_its_memory_and_its_file(store: Store) -> None:
    assert 0 < value(store, "trivet_broker_memory_bytes") < value(store, "trivet_broker_memory_limit_bytes")
    assert value(store, "trivet_broker_append_only") == 1
    assert value(store, "trivet_broker_append_only_ok") == 1
    assert value(store, "trivet_broker_rewrite_ok") == 1
    assert 0 < value(store, "trivet_broker_round_trip_seconds") < 60


def test_keys_that_are_about_to_expire_are_counted_until_they_are_rotated(store: Store) -> None:
    now = datetime.now(UTC)
    store.keys.create("for long", ("read",), expires_at=now + timedelta(days=30))
    store.keys.create("for ever", ("read",))
    key, _ = store.keys.create("soon", ("read",), expires_at=now + timedelta(days=3))
    assert value(store, "trivet_keys_expiring") == 1
    store.keys.rotate(key.id, grace_s=3600, expires_at=now + timedelta(days=60))
    assert value(store, "trivet_keys_expiring") == 0
