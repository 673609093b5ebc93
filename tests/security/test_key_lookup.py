"""Which keys exist is not told by how much work a refusal takes: counted in round trips, commands and digests, not in
time.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from service.jobs.files import DataLayout
from service.jobs.store import Store, keys
from service.jobs.store.client import BrokerClient


@dataclass
class Work:
    """What was done since it was last cleared."""

    trips: list[tuple[str, ...]] = field(default_factory=list)
    commands: int = 0
    digests: int = 0
    comparisons: int = 0


class Counting(BrokerClient):
    """A client that notes what it sends, without what differs from secret to secret."""

    work: Work

    def _run(self, *words: str | int | float | bytes) -> Any:
        self.work.trips.append(tuple(map(str, words[:2])))
        return super()._run(*words)


@pytest.fixture
def work(broker: str, redis: redis_py.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    counted = Work()

    def digest(*arguments: Any) -> bytes:
        counted.digests += 1
        return hmac.digest(*arguments)

    def compare_digest(*arguments: Any) -> bool:
        counted.comparisons += 1
        return hmac.compare_digest(*arguments)

    counting = type("hmac", (), {"digest": staticmethod(digest), "compare_digest": staticmethod(compare_digest)})
    monkeypatch.setattr(keys, "hmac", counting)
    return counted


def verified(store: Store, work: Work, redis: redis_py.Redis, secret: str) -> tuple[bool, Work]:
    """Whether a secret is a key's, and what it took to say so."""
    before = redis.info("commandstats")
    work.trips, work.digests, work.comparisons = [], 0, 0
    found = store.keys.verify(secret) is not None
    after = redis.info("commandstats")
    commands = sum(after[name]["calls"] - before.get(name, {"calls": 0})["calls"] for name in after)
    return found, Work(list(work.trips), commands, work.digests, work.comparisons)


def test_a_refusal_takes_the_same_work_whether_the_key_exists_or_not(
    broker: str, redis: redis_py.Redis, tmp_path: Path, work: Work
) -> None:
    store = Store.connect(broker, DataLayout(tmp_path))
    key, secret = store.keys.create("ann", ["admin"])
    client = Counting(broker)
    client.work = work
    object.__setattr__(store.keys, "client", client)
    verified(store, work, redis, secret)
    used, _ = store.keys.create("never used", ["read"])
    refusals = [
        verified(store, work, redis, tried)
        for tried in (
            f"tvt_{key.id}_{'x' * 43}",
            f"tvt_{used.id}_{'x' * 43}",
            f"tvt_{'0' * 16}_{'x' * 43}",
            "tvt__",
            "nothing",
        )
    ]
    assert [found for found, _ in refusals] == [False] * 5
    first = refusals[0][1]
    assert (len(first.trips), first.digests, first.comparisons) == (1, 1, 1)
    assert all(took == first for _, took in refusals)
    client.close()
    store.close()
