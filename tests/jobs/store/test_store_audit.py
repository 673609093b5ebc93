"""The audit log over a real broker and real files: complete, in order, and bounded."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson
import pytest
import redis as redis_py

from service.jobs.records.audit import AuditEntry, AuditRecord, verify_chain
from service.jobs.store import AuditFilter, AuditLog, Store
from service.jobs.store.audit import REFUSALS_RECORDED
from service.jobs.store.audit_files import AuditFiles
from service.jobs.store.keyspace import AUDIT, AUDIT_HEAD, AUDIT_REFUSALS

EVERYTHING = AuditFilter()


def record(index: int, actor: str = "ann") -> AuditRecord:
    return AuditRecord(action="job.cancel", actor=actor, job=f"job_{index}", address="10.0.0.1")


@dataclass(frozen=True)
class Logs:
    """Logs of several processes over one broker and one folder."""

    store: Store

    def open(self, kept: int = 10, max_bytes: int = 1 << 30) -> AuditLog:
        files = AuditFiles(self.folder, max_bytes)
        return AuditLog(self.store.client, files, kept)

    @property
    def folder(self) -> Path:
        return self.store.files.data.audit


@pytest.fixture
def logs(store: Store) -> Logs:
    return Logs(store)


def jobs_of(log: AuditLog, wanted: AuditFilter = EVERYTHING) -> list[str | None]:
    return [orjson.loads(line)["job"] for line in log.lines(wanted)]


def paged(log: AuditLog, wanted: AuditFilter = EVERYTHING, limit: int = 7) -> Iterator[AuditEntry]:
    """All pages, newest first."""
    cursor: int | None = None
    while True:
        page = log.page(wanted, limit=limit, before=cursor)
        yield from page.items
        if page.next_cursor is None:
            return
        cursor = int(page.next_cursor)


def test_every_entry_is_kept_in_order_in_the_stream_and_then_in_files(logs: Logs, redis: redis_py.Redis) -> None:
    log = logs.open(kept=10)
    for index in range(57):
        log.append([record(index)])
    assert 10 <= redis.xlen(AUDIT()) < 20
    assert jobs_of(log) == [f"job_{index}" for index in range(57)]
    assert [entry.number for entry in paged(log)] == list(range(57, 0, -1))
    assert verify_chain(log.lines(EVERYTHING), [log.head()]).entries == 57


def test_processes_that_write_at_once_make_one_chain(logs: Logs) -> None:
    writers, each = 6, 25
    gate = threading.Barrier(writers)
    shared = logs.open(kept=20)

    def write(name: str, log: AuditLog) -> None:
        gate.wait()
        for index in range(each):
            log.append([record(index, name), record(index, name)])

    threads = [
        threading.Thread(target=write, args=(f"w{number}", shared if number % 2 else logs.open(kept=20)))
        for number in range(writers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verify_chain(shared.lines(EVERYTHING), [shared.head()]).entries == writers * each * 2
    for number in range(writers):
        assert jobs_of(shared, AuditFilter(actor=f"w{number}")) == [f"job_{index // 2}" for index in range(each * 2)]


def test_nothing_is_lost_or_doubled_where_a_process_died_between_writing_and_trimming(
    logs: Logs, redis: redis_py.Redis
) -> None:
    log = logs.open(kept=4)
    log.append([record(index) for index in range(7)])
    moved = [fields[b"e"] for _, fields in redis.xrange(AUDIT(), count=3)]
    with log.files.locked() as is_held:
        assert is_held
        log.files.append(1, moved)
    with next(logs.folder.glob("audit-*.jsonl")).open("ab") as file:
        file.write(b'{"torn":')
    assert len(list(paged(log))) == 7
    log.append([record(7)])
    assert jobs_of(log) == [f"job_{index}" for index in range(8)]
    assert redis.xlen(AUDIT()) == 4
    assert verify_chain(log.lines(EVERYTHING), [log.head()]).entries == 8


def test_only_one_process_writes_files_at_a_time(logs: Logs, redis: redis_py.Redis) -> None:
    log = logs.open(kept=2)
    with AuditFiles(logs.folder, 1 << 30).locked() as is_held:
        assert is_held
        log.append([record(index) for index in range(9)])
        assert redis.xlen(AUDIT()) == 9
    log.append([record(9)])
    assert redis.xlen(AUDIT()) == 2
    assert verify_chain(log.lines(EVERYTHING)).entries == 10


def test_entries_stay_in_the_broker_while_files_cannot_be_written(logs: Logs, redis: redis_py.Redis) -> None:
    logs.folder.parent.mkdir(parents=True)
    logs.folder.write_text("in the way")
    log = logs.open(kept=2)
    for index in range(9):
        log.append([record(index)])
    assert redis.xlen(AUDIT()) == 9
    logs.folder.unlink()
    log.append([record(9)])
    assert redis.xlen(AUDIT()) == 2
    assert verify_chain(log.lines(EVERYTHING)).entries == 10


def test_files_are_limited_and_the_oldest_go_first(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.jobs.store.audit_files._FILE_BYTES", 2000)
    log = logs.open(kept=4, max_bytes=10_000)
    for index in range(120):
        log.append([record(index)])
    sizes = [path.stat().st_size for path in logs.folder.glob("audit-*.jsonl")]
    assert 5000 < sum(sizes) <= 10_000
    found = verify_chain(log.lines(EVERYTHING), [log.head()])
    assert 1 < found.first < 110
    assert found.head.number == 120
    assert [entry.number for entry in paged(log)] == list(range(120, found.first - 1, -1))


def test_numbers_go_on_where_the_broker_lost_everything(logs: Logs, redis: redis_py.Redis) -> None:
    log = logs.open(kept=4)
    log.append([record(index) for index in range(20)])
    redis.flushall()
    assert logs.open().head().number == 16
    logs.open(kept=4).append([record(99)])
    found = verify_chain(log.lines(EVERYTHING), [log.head()])
    assert (found.first, found.entries) == (1, 17)


def test_whoever_replaces_the_newest_entries_in_the_broker_is_noticed(logs: Logs, redis: redis_py.Redis) -> None:
    log = logs.open(kept=4)
    log.append([record(index) for index in range(6)])
    noted = log.head()
    redis.xdel(AUDIT(), "6-0")
    with pytest.raises(Exception, match="entry 6 was noted and is missing"):
        verify_chain(log.lines(EVERYTHING), [noted])
    assert redis.hget(AUDIT_HEAD(), "hash").decode() == noted.hash


def test_filters_are_those_of_each_entry(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logs.open(kept=5)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    moments = iter(start + timedelta(hours=index) for index in range(60))

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return moment

    monkeypatch.setattr("service.jobs.records.audit.datetime", Clock)
    for index in range(30):
        moment = next(moments)
        log.append([AuditRecord(action="job.cancel", actor=("ann", "bob")[index % 2], job=f"job_{index % 3}")])
        log.append([AuditRecord(action="job.retry", actor=("ann", "bob")[index % 2], job=f"job_{index % 3}")])
    monkeypatch.undo()
    everything = [AuditEntry.model_validate_json(line) for line in log.lines(EVERYTHING)]
    for wanted in (
        AuditFilter(actor="ann"),
        AuditFilter(action="job.retry", job="job_1"),
        AuditFilter(since=start + timedelta(hours=10)),
        AuditFilter(since=start + timedelta(hours=4), until=start + timedelta(hours=9), actor="bob"),
        AuditFilter(actor="nobody"),
    ):
        expected = [entry.number for entry in everything if wanted.admits(entry)]
        assert [orjson.loads(line)["number"] for line in log.lines(wanted)] == expected
        assert [entry.number for entry in paged(log, wanted, limit=3)] == expected[::-1]
    assert len([entry for entry in everything if AuditFilter(since=start + timedelta(hours=10)).admits(entry)]) == 40


def test_a_page_looks_at_a_limited_number_of_entries(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.jobs.store.audit._MOST_LOOKED_AT", 8)
    log = logs.open(kept=5)
    log.append([record(index, "ann" if index == 0 else "bob") for index in range(20)])
    first = log.page(AuditFilter(actor="ann"), limit=5)
    assert (first.items, first.next_cursor) == ((), "13")
    assert [entry.job for entry in paged(log, AuditFilter(actor="ann"))] == ["job_0"]


def test_refusals_that_anybody_can_cause_fill_no_disk(logs: Logs, redis: redis_py.Redis) -> None:
    log = logs.open(kept=1000)
    refusal = AuditRecord(action="key.refuse", actor="", address="10.0.0.1")
    for _ in range(100):
        log.refused(refusal)
    kept = [AuditEntry.model_validate_json(line) for line in log.lines(EVERYTHING)]
    assert len(kept) == REFUSALS_RECORDED["address"]
    assert "not recorded for a minute" in kept[-1].detail["note"]
    log.refused(refusal.model_copy(update={"address": "10.0.0.2"}))
    assert len(list(log.lines(EVERYTHING))) == len(kept) + 1
    redis.set(AUDIT_REFUSALS("all"), REFUSALS_RECORDED["all"], keepttl=True)
    log.refused(refusal.model_copy(update={"address": "10.0.0.3"}))
    assert len(list(log.lines(EVERYTHING))) == len(kept) + 1
    assert all(redis.pttl(name) > 0 for name in redis.keys(AUDIT_REFUSALS("*")))


def test_files_are_for_the_service_alone(logs: Logs) -> None:
    os.umask(0o077)
    logs.open(kept=1).append([record(index) for index in range(5)])
    assert {path.stat().st_mode & 0o077 for path in logs.folder.iterdir()} == {0}
