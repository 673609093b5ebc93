"""Fixtures of the workers' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis as redis_py
from worker_fleet import Fleet

from service.jobs.layout import DataLayout
from service.jobs.store import Store, StoreLimits


@pytest.fixture
def limits() -> StoreLimits:
    return StoreLimits(lease_s=6.0)


@pytest.fixture
def fleet(broker: str, redis: redis_py.Redis, data: DataLayout, limits: StoreLimits) -> Iterator[Fleet]:
    store = Store.connect(broker, data, limits)
    fleet = Fleet(store, data, broker, limits)
    yield fleet
    fleet.close()
