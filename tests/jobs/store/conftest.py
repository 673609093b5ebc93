"""A store on a clean real server, and what tests do to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis as redis_py
from store_builders import LIMITS, World
from store_invariants import Snapshot

from service.jobs.files import DataLayout
from service.jobs.records import Job
from service.jobs.store import Store


@pytest.fixture
def store(broker: str, redis: redis_py.Redis, data: DataLayout) -> Iterator[Store]:
    """Every key that a test leaves behind belongs to a known family, and expires when its family says so."""
    connected = Store.connect(broker, data, LIMITS)
    yield connected
    connected.close()
    assert Snapshot(redis).strays() == []


@pytest.fixture
def world(store: Store, redis: redis_py.Redis) -> World:
    return World(store, redis)


@pytest.fixture
def gang(world: World) -> Job:
    """A job that takes hosts a and b."""
    world.beat("a", cpu=3)
    world.beat("b", cpu=1)
    job = world.submit(4, max_hosts=2, retries=1)
    assert world.store.attempts.place() == [job.id]
    return world.store.jobs.get(job.id)
