"""Appends to the audit log for requests that wait in the event loop."""

from __future__ import annotations

import asyncio

from service.jobs.records.audit import AuditRecord
from service.jobs.store import AuditLog, in_loop

_MOST_IN_LOOP = 64
"""Most entries that are made in the event loop without holding up other requests; more are made in a thread."""


class AuditQueue:
    """Appends entries in batches: those that arrive during a write go into the next one. A small batch takes no
    thread.
    """

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._waiting: list[tuple[list[AuditRecord], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._since_archived = 0

    async def append(self, records: list[AuditRecord]) -> None:
        """Return once the entries are written. Raises :class:`~service.jobs.store.StoreUnavailable`."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((records, written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        await written

    async def _write(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                error = await self._write_entries([record for records, _ in waiting for record in records])
                for written in (written for _, written in waiting if not written.done()):
                    if error is None:
                        written.set_result(None)
                    else:
                        written.set_exception(error)
        finally:
            self._writing = None

    async def _write_entries(self, records: list[AuditRecord]) -> Exception | None:
        """Write entries; return why they could not be written."""
        try:
            if len(records) > _MOST_IN_LOOP or not await in_loop(self._log.append_at_once, records):
                await asyncio.to_thread(self._log.append, records)
                return None
            self._since_archived += len(records)
            if self._since_archived >= self._log.kept:
                self._since_archived = 0
                await asyncio.to_thread(self._log.archive)
        except Exception as error:
            return error
        return None
