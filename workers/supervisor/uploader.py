"""Sends events to the store in batches, through broker outages; unrecorded ones go to disk first."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, cast

import orjson

from service.jobs.events import Event, MetricEvent, ProgressEvent
from service.jobs.records import AttemptRef, Superseded
from service.jobs.records.webhooks import ReachedThreshold
from service.jobs.spec.common import NotifySpec
from service.jobs.store import Attempts, StoreUnavailable
from workers import event_protocol
from workers.supervisor.lease import retry_until
from workers.supervisor.logs import GrowingFile
from workers.supervisor.settings import SupervisorSettings

_EXPENDABLE = frozenset({"log", "span", "metric", "progress", "search"})
_MOST_QUEUED = 64 << 20
"""Bytes of the supervisor's own waiting events beyond which less important ones are only recorded."""
Disk = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs disk work in a thread of its own, in order."""


class Uploader:
    """Call :meth:`put` and :meth:`relay` from the event loop; :meth:`run` sends at most ten batches a second, the
    first one at once.

    Only the newest progress in a batch is sent. The supervisor's own reports are recorded before they are sent;
    beyond ``upload_capacity`` waiting events, less important ones are only recorded. ``lost`` is called when the
    attempt turns out to be superseded; then nothing is sent any more.
    """

    def __init__(
        self,
        attempts: Attempts,
        ref: AttemptRef,
        record: GrowingFile,
        lost: Callable[[], None],
        *,
        thresholds: Thresholds,
        disk: Disk,
        settings: SupervisorSettings,
    ) -> None:
        self._attempts, self._ref, self._lost_to = attempts, ref, lost
        self._record, self._disk, self._thresholds = record, disk, thresholds
        self._queue: deque[tuple[Event, int]] = deque()
        """Waiting events, and the bytes of each."""
        self._queued_bytes = 0
        self._settings = settings
        self._missed = 0
        self._batch = 0
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = asyncio.Event()
        self._lost = False

    def put(self, event: Event) -> None:
        """Record and relay an event of the supervisor's own."""
        self.record(event)
        self.offer(event)

    def offer(self, event: Event) -> None:
        """Relay an event that is recorded, or need not be, unless too many already wait."""
        is_full = len(self._queue) >= self._settings.upload_capacity or self._queued_bytes >= _MOST_QUEUED
        if self._lost or (is_full and event["type"] in _EXPENDABLE):
            self._missed += 1
            return
        self.relay(event)

    def relay(self, event: Event) -> None:
        if not self._lost:
            size = len(orjson.dumps(event, default=repr))
            self._queue.append((event, size))
            self._queued_bytes += size
            self._wake.set()

    @property
    def has_room(self) -> bool:
        """Return whether to relay recorded events now rather than let them wait on disk."""
        settings = self._settings
        return len(self._queue) < settings.upload_full and self._queued_bytes < settings.upload_full_bytes

    async def room(self) -> None:
        """Wait until there is room, or until nothing is sent any more."""
        while not (self.has_room or self._lost):
            self._room.clear()
            await self._room.wait()

    async def run(self) -> None:
        """Send until closed and empty, or superseded."""
        try:
            await self._send_all()
        finally:
            self._lost = True
            self._room.set()

    async def _send_all(self) -> None:
        size = self._settings.upload_batch
        while await self._something():
            batch = self._next_batch()
            self._room.set()
            await self._disk(self._record.write)
            await self._send(batch)
            if len(self._queue) < size:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), self._settings.upload_interval_s)
        await self._disk(self._record.write)

    def _next_batch(self) -> list[Event]:
        """Take the first waiting events, as many as one call may have."""
        batch: list[Event] = []
        size = 0
        while self._queue and len(batch) < self._settings.upload_batch and size < self._settings.upload_batch_bytes:
            event, its_bytes = self._queue.popleft()
            batch.append(event)
            size += its_bytes
        self._queued_bytes -= size
        return batch

    def close(self) -> None:
        """Take no more events; :meth:`run` ends when all are sent."""
        if self._missed and not self._lost:
            notice = event_protocol.log_event(
                f"{self._missed} events were not relayed; they are in the attempt's record"
            )
            self.relay(notice)
        self._closed.set()
        self._wake.set()

    async def _something(self) -> bool:
        while not self._queue and not self._closed.is_set() and not self._lost:
            self._wake.clear()
            await self._wake.wait()
        return bool(self._queue) and not self._lost

    async def _send(self, batch: list[Event]) -> None:
        self._batch += 1
        newest = next((event for event in reversed(batch) if event["type"] == "progress"), None)
        told = [event for event in batch if event["type"] != "progress" or event is newest]
        progress, reached = cast(ProgressEvent | None, newest), self._thresholds.reached(batch)
        try:
            await self._emit(told, progress, self._batch, reached)
        except Superseded:
            self._lost = True
            self._queue.clear()
            self._queued_bytes = 0
            self._room.set()
            self._lost_to()
        except StoreUnavailable:
            self._missed += len(batch)

    async def tell_of_result(self, result: Mapping[str, Any] | None) -> None:
        """Send notices about numbers of the result that reached a threshold, and those not sent yet. Raises like
        :meth:`Attempts.emit`.
        """
        if reached := self._thresholds.reached_by_result(result):
            await self._emit([], None, 0, reached)

    async def _emit(
        self, events: list[Event], progress: ProgressEvent | None, batch: int, reached: list[ReachedThreshold]
    ) -> None:
        patience_s = self._settings.report_within_s
        await retry_until(patience_s, self._attempts.emit, self._ref, events, progress, batch, reached)
        self._thresholds.note_told(reached)

    def record(self, event: Event) -> None:
        """Only record an event: the store puts it into the stream itself."""
        self._record.add(orjson.dumps(event, default=repr, option=orjson.OPT_APPEND_NEWLINE))


class Thresholds:
    """Keeps which thresholds this attempt has reached, and of which of them the store has yet to be told. The
    store knows those of earlier attempts.
    """

    def __init__(self, notify: NotifySpec | None) -> None:
        self._notify = notify
        self._known: set[str] = set()
        self._untold: list[ReachedThreshold] = []

    def reached(self, events: Sequence[Event]) -> list[ReachedThreshold]:
        """Return the first metrics that meet their thresholds, of these events and of earlier ones that the store has
        not been told of.
        """
        for event in events:
            if event["type"] == "metric":
                metric = cast(MetricEvent, event)
                self._add(metric["values"], metric["step"])
        return list(self._untold)

    def reached_by_result(self, result: Mapping[str, Any] | None) -> list[ReachedThreshold]:
        """Return the numbers of a result that meet their thresholds, unless a metric of that name already did, and
        such metrics that the store has not been told of.
        """
        self._add(result or {}, None)
        return list(self._untold)

    def note_told(self, reached: Collection[ReachedThreshold]) -> None:
        """Note that the store has these."""
        self._untold = [each for each in self._untold if each not in reached]

    def _add(self, numbers: Mapping[str, Any], step: int | None) -> None:
        if self._notify is None:
            return
        for name, value in self._notify.reached(numbers):
            if name not in self._known:
                self._known.add(name)
                threshold = self._notify.when[name]
                self._untold.append(ReachedThreshold(name=name, value=value, threshold=threshold, step=step))
