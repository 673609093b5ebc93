"""Exports jobs from an API process, while they run and when they end. Every process may do it: the broker gives each
export to one of them at a time.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from api.deliveries import FAILURES, DeliveryRounds, RoundTimes
from api.exports import EXPORTERS
from api.exports.base import ExportedJob
from api.exports.following import Sent, finish, follow
from api.exports.server import EVERYWHERE, ExportFailed, ExportServer, Limit, connect
from service.jobs.records import Job, NotFound
from service.jobs.settings import Settings
from service.jobs.spec.common import ACTIVE, OFFLINE, TERMINAL
from service.jobs.store import Store, StoreUnavailable
from service.jobs.store.exports import DueExport

_AT_ONCE = 8
_SHOWN = 300
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportTimes(RoundTimes):
    """Times of an exporter, in seconds."""

    hold_s: float = 1800.0
    """An export that has not reported by then is made again, since its process may have ended."""
    longest_s: float = 1500.0
    """An export that takes longer has failed."""
    live_hold_s: float = 120.0
    live_longest_s: float = 60.0
    """These two are for exports of jobs that go on."""
    follow_s: float = 10.0
    """Pause between two looks at a running job."""
    idle_s: float = 60.0
    """A job that is queued again is looked at after this pause."""
    seat_s: float = 150.0
    """An exporter that holds runs is this process's for so long after each use; it outlasts ``idle_s``."""
    elsewhere_s: float = 1.0
    """Pause after which an export is due again that another process's exporter makes."""


class JobExports(DeliveryRounds[ExportTimes]):
    """Makes exports in rounds, in threads of its own."""

    def __init__(self, settings: Settings, store: Store, times: ExportTimes = ExportTimes()) -> None:
        super().__init__(settings, store, times, retry_hours=settings.export_retry_hours)
        self._under_way: set[Limit] = set()
        self._exporters = {name: make() for name, make in EXPORTERS.items()}
        self._process = secrets.token_hex(8)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="export")
        self._tasks: set[asyncio.Future[None]] = set()

    async def stop(self) -> None:
        for limit in tuple(self._under_way):
            limit.is_stopping.set()
        await super().stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        for name, exporter in self._exporters.items():
            exporter.close()
            if exporter.holds_runs:
                with suppress(StoreUnavailable):  # then its time runs out
                    self._store.exports.leave_seat(name, self._process)

    async def _round(self) -> bool:
        """Take as many as there are free threads; a target that does not answer holds up no other export."""
        free = _AT_ONCE - len(self._tasks)
        if not free or not await asyncio.to_thread(self._store.exports.exist):
            return False
        hold, live_hold = self._times.hold_s, self._times.live_hold_s
        due = await asyncio.to_thread(self._store.exports.due, free, hold, live_hold)
        for each in due:
            task = asyncio.get_running_loop().run_in_executor(self._threads, self._export, each)
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        return len(due) == free

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # it is due again after its hold
            log.warning("an export was not noted: %s: %s", type(error).__name__, error)

    def _export(self, due: DueExport) -> None:
        try:
            job = self._store.jobs.get(due.job_id)
        except NotFound:
            return self._store.exports.over(due, None)
        if (exporter := self._exporters.get(due.target)) is None:
            return self._store.exports.over(due, None)
        seat_s = self._times.seat_s
        if exporter.holds_runs and not self._store.exports.hold_seat(due.target, self._process, seat_s):
            return self._store.exports.put_back(due, self._times.elsewhere_s)
        is_live = due.is_live or job.state not in TERMINAL  # it was retried meanwhile
        limit = Limit(self._times.live_longest_s if is_live else self._times.longest_s)
        self._under_way.add(limit)
        try:
            with self._server(job, due.target, limit) as server:
                return self._tell(replace(due, is_live=is_live), job, server)
        except (ExportFailed, *FAILURES) as error:
            return self._failed(due, f"{type(error).__name__}: {error}"[:_SHOWN])
        except (StoreUnavailable, NotFound):
            raise  # it is due again after its hold
        except Exception as error:
            log.exception("%s: the export to %s failed unexpectedly", due.job_id, due.target)
            return self._failed(due, f"{type(error).__name__}: {error}"[:_SHOWN])
        finally:
            self._under_way.discard(limit)

    def _tell(self, due: DueExport, job: Job, server: ExportServer | None) -> None:
        exporter, told = self._exporters[due.target], ExportedJob(job, self._store, self._settings.layout)
        sent = None if due.sent is None else Sent.parse(due.sent)
        if due.is_live:
            pause = self._times.follow_s if job.state in ACTIVE else self._times.idle_s
            self._store.exports.follow(due, follow(exporter, told, server, sent).plain(), pause)
        else:
            where = finish(exporter, told, server, sent)
            self._store.exports.over(due, f"exported to {due.target}: {where}")

    @contextmanager
    def _server(self, job: Job, target: str, limit: Limit) -> Iterator[ExportServer | None]:
        """Yield the server of the target's URL, ``None`` if it has none."""
        url = job.spec.get("export", {}).get(target)
        if not isinstance(url, str) or url == OFFLINE:
            yield None
            return
        own = getattr(self._settings.store_limits.exports, target)
        allowed = EVERYWHERE if url == own else self._allowed
        with connect(url, allowed, self._settings.bearer_tokens, limit) as server:
            yield server

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
