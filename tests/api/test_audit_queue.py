"""Entries of requests that wait in the event loop: all written, together, and archived in time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import orjson
import pytest
import redis as redis_py

from api.callers import AuditQueue
from service.jobs.files import DataLayout
from service.jobs.records.audit import AuditRecord, verify_chain
from service.jobs.store import AuditFilter, AuditLog, Store, StoreUnavailable, in_loop
from service.jobs.store.audit_files import AuditFiles
from service.jobs.store.keyspace import AUDIT

KEPT = 10


@pytest.fixture
def log(store: Store, tmp_path: Path) -> AuditLog:
    """A log that keeps few entries in the broker, and its own files."""
    return AuditLog(store.client, AuditFiles(tmp_path / "audit", 1 << 30), KEPT)


def record(index: int) -> AuditRecord:
    return AuditRecord(action="job.submit", actor="ann", job=f"job_{index}", address="10.0.0.1")


def appended(log: AuditLog, store: Store, sizes: list[int]) -> None:
    """Append so many entries for each of several requests that come at once."""

    async def append() -> None:
        queue, count = AuditQueue(log), iter(range(sum(sizes)))
        await asyncio.gather(*(queue.append([record(next(count)) for _ in range(size)]) for size in sizes))
        await store.client.leave_loop()

    asyncio.run(append())


def jobs_of(log: AuditLog) -> list[str]:
    return [orjson.loads(line)["job"] for line in log.lines(AuditFilter())]


@pytest.mark.parametrize("sizes", [[1] * 30, [1, 70, 1], [65]])
def test_each_entry_is_written_once_and_in_order(log: AuditLog, store: Store, sizes: list[int]) -> None:
    appended(log, store, sizes)
    assert jobs_of(log) == [f"job_{index}" for index in range(sum(sizes))]
    assert verify_chain(log.lines(AuditFilter()), [log.head()]).entries == sum(sizes)


def test_older_entries_go_to_the_files(log: AuditLog, store: Store, redis: redis_py.Redis) -> None:
    for _ in range(5):
        appended(log, store, [1] * 12)
    assert redis.xlen(AUDIT()) <= 2 * KEPT + 1
    assert len(jobs_of(log)) == 60


def test_a_thread_that_writes_keeps_the_loop_from_nothing(log: AuditLog, store: Store) -> None:
    """What would have to wait for it does so in a thread, and the loop serves others."""

    async def append() -> None:
        assert log._writing.acquire(blocking=False)
        waiting = asyncio.create_task(AuditQueue(log).append([record(0)]))
        assert await in_loop(store.keys.list) == []
        assert not waiting.done()
        threading.Timer(0.0, log._writing.release).start()
        await waiting
        await store.client.leave_loop()

    asyncio.run(append())
    assert jobs_of(log) == ["job_0"]


def test_all_that_wait_learn_that_the_broker_is_gone(tmp_path: Path) -> None:
    store = Store.connect(f"unix://{tmp_path}/nothing.sock", DataLayout(tmp_path))

    async def append() -> list[BaseException | None]:
        queue = AuditQueue(store.audit)
        return await asyncio.gather(*(queue.append([record(index)]) for index in range(3)), return_exceptions=True)

    assert [type(each) for each in asyncio.run(append())] == [StoreUnavailable] * 3
