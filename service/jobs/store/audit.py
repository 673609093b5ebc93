"""Keeps the audit log: its newest entries in a stream of the broker, the older ones in files of the data folder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import orjson

from service.jobs.records.audit import AuditAction, AuditEntry, AuditHead, AuditPage, AuditRecord, chained
from service.jobs.store import stubs
from service.jobs.store.audit_files import AuditFiles
from service.jobs.store.client import BrokerClient, StoreUnavailable
from service.jobs.store.keyspace import AUDIT, AUDIT_HEAD, AUDIT_REFUSALS
from service.jobs.store.loop_calls import current_call

log = logging.getLogger(__name__)

_READ = 1000
_MOST_LOOKED_AT = 20_000
_CLOCKS_DIFFER = timedelta(hours=1)
"""Entries are in the order in which they were written, by several hosts: their times are only nearly in order."""
_ATTEMPTS = 1000

REFUSALS_WINDOW_S = 60.0
REFUSALS_RECORDED = {"address": 20, "all": 600}
"""The most refused requests recorded within a window: anyone who reaches the service can cause them."""


@dataclass(frozen=True)
class AuditFilter:
    """Selects entries; ``None`` is any."""

    since: datetime | None = None
    until: datetime | None = None
    actor: str | None = None
    action: AuditAction | None = None
    job: str | None = None

    def admits(self, entry: AuditEntry) -> bool:
        exact = ((self.actor, entry.actor), (self.action, entry.action), (self.job, entry.job))
        if any(wanted is not None and wanted != found for wanted, found in exact):
            return False
        return (self.since is None or entry.time >= self.since) and (self.until is None or entry.time < self.until)

    def is_past(self, entry: AuditEntry) -> bool:
        """Return whether no entry before this one matches."""
        return self.since is not None and entry.time < self.since - _CLOCKS_DIFFER


@dataclass(eq=False)
class _Waiting:
    """Records of one caller that wait to be written, and the outcome."""

    records: Sequence[AuditRecord]
    is_over: bool = False
    error: Exception | None = None


@dataclass(frozen=True)
class AuditLog:
    """Append-only. When :meth:`append` returns, the entries are as safe as anything in the broker.

    The stream keeps between ``kept`` and twice as many of the newest entries; others are moved to the files, and leave
    the stream only when they are on disk.
    """

    client: BrokerClient
    files: AuditFiles
    kept: int = 1000
    _queue: list[_Waiting] = field(default_factory=list)
    _queueing: threading.Lock = field(default_factory=threading.Lock)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _known: list[AuditHead] = field(default_factory=lambda: [AuditHead()])

    def append(self, records: Sequence[AuditRecord]) -> None:
        """Append entries. Callers that come while others are being written share one write. Code in an event
        loop may not wait like this: see :meth:`append_at_once`.
        """
        assert current_call() is None
        mine = _Waiting(records)
        with self._queueing:
            self._queue.append(mine)
        with self._writing:
            if not mine.is_over:
                self._write_queued()
        if mine.error is not None:
            raise mine.error

    def append_at_once(self, records: Sequence[AuditRecord]) -> bool:
        """Append entries, unless others are being written; return whether they were. The caller calls
        :meth:`archive` now and then.
        """
        if not self._writing.acquire(blocking=False):
            return False
        try:
            self._write(records)
        except Exception:
            self._known[0] = AuditHead()
            raise
        finally:
            self._writing.release()
        return True

    def refused(self, record: AuditRecord) -> None:
        """Append the entry of a refused request, unless there were too many within a minute."""
        for whose, most in REFUSALS_RECORDED.items():
            counter = AUDIT_REFUSALS(record.address or "socket" if whose == "address" else "all")
            count = stubs.count_within(self.client, counter, round(REFUSALS_WINDOW_S * 1000))
            if count > most:
                return
            if count == most:
                note = f"further refusals, counted by {whose}, are not recorded for a minute"
                record = record.model_copy(update={"detail": {**record.detail, "note": note}})
        self.append([record])

    def head(self) -> AuditHead:
        """Return the newest entry."""
        number, newest = self.client.call("HMGET", AUDIT_HEAD(), "number", "hash")
        return self.files.head() if number is None else AuditHead(number=int(number), hash=newest)

    def page(self, wanted: AuditFilter, *, limit: int, before: int | None = None) -> AuditPage:
        """Return up to ``limit`` entries whose number is less than ``before``, newest first."""
        head = self.head()
        items: list[AuditEntry] = []
        lowest = before if before is not None else head.number + 1
        for looked_at, entry in enumerate(self._newest_first(lowest), start=1):
            if wanted.is_past(entry):
                break
            lowest = entry.number
            if wanted.admits(entry):
                items.append(entry)
            if len(items) == limit or looked_at == _MOST_LOOKED_AT:
                return AuditPage(items=tuple(items), next_cursor=str(lowest), head=head)
        return AuditPage(items=tuple(items), head=head)

    def lines(self, wanted: AuditFilter) -> Iterator[bytes]:
        """Yield entries as JSON lines, oldest first."""
        for line in self._oldest_first():
            if wanted == AuditFilter() or wanted.admits(AuditEntry.model_validate_json(line)):
                yield line + b"\n"

    def _write_queued(self) -> None:
        with self._queueing:
            waiting = self._queue[:]
            self._queue.clear()
        try:
            length = self._write([record for each in waiting for record in each.records])
        except Exception as error:
            self._known[0] = AuditHead()
            for each in waiting:
                each.error = error
        else:
            if length >= 2 * self.kept:
                self.archive()
        finally:
            for each in waiting:
                each.is_over = True

    def _write(self, records: Sequence[AuditRecord]) -> int:
        """Append entries after the newest one of any writer; return the length of the stream."""
        for _ in range(_ATTEMPTS):
            head = self._known[0] if self._known[0].number else self.head()
            entries = chained(records, head)
            lines = [entry.line.decode() for entry in entries]
            answer = stubs.append_audit(self.client, head.number, head.hash, entries[-1].hash, *lines)
            length, self._known[0] = int(answer[0]), AuditHead(number=int(answer[1]), hash=answer[2])
            if length:
                return length
        raise RuntimeError(f"others appended to the audit log {_ATTEMPTS} times while this process tried to")

    def archive(self) -> None:
        """Move all but the newest entries from the stream to the files. If the files cannot be written, the
        entries stay in the stream, and the next call tries again.
        """
        try:
            with self.files.locked() as is_held:
                if is_held:
                    self._move(self.client.call("XLEN", AUDIT()) - self.kept)
        except (OSError, StoreUnavailable) as error:
            log.warning("the older part of the audit log could not be written, and stays in the broker: %s", error)

    def _move(self, surplus: int) -> None:
        archived = self.files.head().number
        last = 0
        while surplus > 0:
            found = self._stream(f"({last}-0", "+", min(surplus, _READ))
            if not found:
                break
            fresh = [line for number, line in found if number > archived]
            if fresh:
                self.files.append(found[len(found) - len(fresh)][0], fresh)
            last, surplus = found[-1][0], surplus - len(found)
            self.client.call("XTRIM", AUDIT(), "MINID", f"{last + 1}-0")
        for path in self.files.delete_oldest():
            log.warning("deleted %s: the audit log is limited to %d bytes of files", path, self.files.max_bytes)

    def _newest_first(self, before: int) -> Iterator[AuditEntry]:
        while found := self._stream(f"({before}-0", "-", _READ, "XREVRANGE"):
            for number, line in found:
                yield AuditEntry.model_validate_json(line)
                before = number
        for line in self.files.newest_first(before):
            entry = AuditEntry.model_validate_json(line)
            if entry.number < before:
                yield entry
                before = entry.number

    def _oldest_first(self) -> Iterator[bytes]:
        """Yield every line once, also those that are moved to the files meanwhile."""
        last = 0
        while True:
            for line in self.files.oldest_first(last):
                if (number := orjson.loads(line)["number"]) > last:
                    yield line
                    last = number
            found = self._stream(f"({last}-0", "+", _READ)
            if found and found[0][0] > last + 1 and self.files.head().number > last:
                continue
            if not found:
                return
            for number, line in found:
                yield line
                last = number

    def _stream(self, start: str, end: str, count: int, command: str = "XRANGE") -> list[tuple[int, bytes]]:
        found: list[Any] = self.client.call(command, AUDIT(), start, end, "COUNT", count)
        return [(int(entry_id.partition("-")[0]), fields["e"].encode()) for entry_id, fields in found]
