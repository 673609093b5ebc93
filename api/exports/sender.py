"""Exports ended jobs from an API process. Every process may do it: the broker gives each export to one of them at a
time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import time
from dataclasses import dataclass

import httpx2

from api.deliveries import DeliveryRounds, ForbiddenTarget, RoundTimes
from api.exports import EXPORTERS
from api.exports.base import ExportedJob
from api.exports.server import EVERYWHERE, ExportFailed, Limit, connect
from service.jobs.records import Job, NotFound
from service.jobs.records.webhooks import RetrySchedule
from service.jobs.settings import Settings
from service.jobs.spec.common import TERMINAL
from service.jobs.store import Store
from service.jobs.store.exports import DueExport

_AT_ONCE = 4
_SHOWN = 300
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportTimes(RoundTimes):
    """Times of an exporter, in seconds."""

    hold_s: float = 1800.0
    """An export that has not reported by then is made again, since its process may have ended."""
    longest_s: float = 1500.0
    """An export that takes longer has failed."""


class JobExports(DeliveryRounds):
    """Makes exports in rounds, in threads."""

    def __init__(self, settings: Settings, store: Store, times: ExportTimes = ExportTimes()) -> None:
        super().__init__("exports", times)
        self._settings, self._store, self._times = settings, store, times
        self._allowed = [ipaddress.ip_network(each) for each in settings.webhook_networks]
        self._schedule = RetrySchedule(settings.export_retry_hours * 3600)
        self._under_way: set[Limit] = set()

    async def stop(self) -> None:
        for limit in tuple(self._under_way):
            limit.is_stopping.set()
        await super().stop()

    async def _round(self) -> bool:
        if not await asyncio.to_thread(self._store.exports.exist):
            return False
        due = await asyncio.to_thread(self._store.exports.due, _AT_ONCE, self._times.hold_s)
        await asyncio.gather(*(asyncio.to_thread(self._export, each) for each in due))
        return len(due) > 0

    def _export(self, due: DueExport) -> None:
        try:
            job = self._store.jobs.get(due.job_id)
        except NotFound:
            return self._store.exports.over(due, None)
        if job.state not in TERMINAL or due.target not in EXPORTERS:
            return self._store.exports.over(due, None)  # it was retried; its end will be recorded again
        limit = Limit(self._times.longest_s)
        self._under_way.add(limit)
        try:
            where = self._tell(job, due.target, limit)
        except (ExportFailed, ForbiddenTarget, OSError, ValueError, httpx2.HTTPError) as error:
            return self._failed(due, f"{type(error).__name__}: {error}"[:_SHOWN])
        finally:
            self._under_way.discard(limit)
        return self._store.exports.over(due, f"exported to {due.target}: {where}")

    def _tell(self, job: Job, target: str, limit: Limit) -> str:
        url = job.spec.get("export", {}).get(target)
        told = ExportedJob(job, self._store, self._settings.layout)
        if not isinstance(url, str):
            return EXPORTERS[target].export(told, None)
        own = getattr(self._settings.store_limits.exports, target)
        allowed = EVERYWHERE if url == own else self._allowed
        with connect(url, allowed, self._settings.bearer_tokens, limit) as server:
            return EXPORTERS[target].export(told, server)

    def _failed(self, due: DueExport, why: str) -> None:
        """Note a failure, which leaves the job as it is."""
        first = due.first_at or time.time()
        passed, chance = time.time() - first, random.random()  # noqa: S311 - jitter
        pause = self._schedule.pause(due.attempts + 1, passed, chance)
        what = f"export to {due.target} failed: {why}"
        if pause is None:
            log.warning("%s: %s", due.job_id, what)
            self._store.exports.over(due, f"{what}; given up after {due.attempts + 1} attempts")
        else:
            self._store.exports.again(due, first, pause, f"{what}; tried again in {pause:.0f} s")
