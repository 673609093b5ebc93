"""A store on a clean real server, with builders for what the tests submit and report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis as redis_py
from store_builders import LIMITS, Submit, train
from store_invariants import Snapshot

from service.jobs.files import DataLayout
from service.jobs.records import AttemptRef, Job
from service.jobs.store import HostReport, Store
from service.jobs.store.keyspace import CLOCK, HOSTS, LEASES, PLACEMENT_IDLE


@pytest.fixture
def store(broker: str, redis: redis_py.Redis, data: DataLayout) -> Iterator[Store]:
    """Every key that a test leaves behind belongs to a known family, and expires when its family says so."""
    connected = Store.connect(broker, data, LIMITS)
    yield connected
    connected.close()
    assert Snapshot(redis).strays() == []


@pytest.fixture
def submit(store: Store) -> Callable[..., Job]:
    def submit_one(ranks: int = 1, **fields: Any) -> Job:
        return store.jobs.submit(train(ranks, **fields), "ada")[0]

    return submit_one


@pytest.fixture
def beat(store: Store) -> Callable[..., Any]:
    def beat_once(name: str, cpu: int = 0, cuda: int = 0, live: tuple[str, ...] = ()) -> Any:
        report = HostReport(name, f"{name}.example", ("Test GPU",) * cuda, cpu, {"trivet": "0"}, live)
        return store.hosts.beat(report)

    return beat_once


@pytest.fixture
def start(store: Store) -> Callable[[Job], list[AttemptRef]]:
    """Place a job and claim all its parts."""

    def start_one(job: Job) -> list[AttemptRef]:
        assert job.id in store.attempts.place()
        placed = store.jobs.get(job.id)
        refs = [AttemptRef(job.id, placed.attempt, share.host) for share in placed.placement]
        for ref in refs:
            store.attempts.claim(ref, f"supervisor-of-{ref}")
        return refs

    return start_one


@pytest.fixture
def expire(redis: redis_py.Redis) -> Callable[[AttemptRef], None]:
    """End a lease now, as if its time had passed."""

    def expire_one(ref: AttemptRef) -> None:
        assert redis.zadd(LEASES(), {str(ref): 1}, xx=True, ch=True) == 1

    return expire_one


@pytest.fixture
def pass_time(redis: redis_py.Redis) -> Callable[[float], None]:
    """Let seconds pass on the store's own clock."""

    def pass_seconds(seconds: float) -> None:
        redis.hincrby(CLOCK(), "now", round(seconds * 1000))
        redis.delete(PLACEMENT_IDLE())

    return pass_seconds


@pytest.fixture
def silence(redis: redis_py.Redis) -> Callable[[str], None]:
    """End a host's heartbeat now."""

    def silence_one(host: str) -> None:
        assert redis.zadd(HOSTS(), {host: 1}, xx=True, ch=True) == 1

    return silence_one


@pytest.fixture
def states(store: Store) -> Callable[[Job], list[str]]:
    """The states that a job's stream tells of, in order."""

    def states_of(job: Job) -> list[str]:
        page = store.events.page(job.id, types={"state"}, limit=1000)
        return [stored.event["state"] for stored in page.items]

    return states_of


@pytest.fixture
def gang(store: Store, submit: Submit, beat: Any) -> Job:
    """A job that takes hosts a and b."""
    beat("a", cpu=3)
    beat("b", cpu=1)
    job = submit(4, max_hosts=2, retries=1)
    assert store.attempts.place() == [job.id]
    return store.jobs.get(job.id)
