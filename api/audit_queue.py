"""Appends to the audit log for requests that wait in the event loop."""

from __future__ import annotations

import asyncio

from service.jobs.audit import AuditRecord
from service.jobs.store import AuditLog


class AuditQueue:
    """Appends what comes while other entries are being written in one write, from one thread."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._waiting: list[tuple[list[AuditRecord], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

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
                error = await self._written([record for records, _ in waiting for record in records])
                for written in (written for _, written in waiting if not written.done()):
                    if error is None:
                        written.set_result(None)
                    else:
                        written.set_exception(error)
        finally:
            self._writing = None

    async def _written(self, records: list[AuditRecord]) -> Exception | None:
        """Write entries; return why they could not be written."""
        try:
            await asyncio.to_thread(self._log.append, records)
        except Exception as error:
            return error
        return None
