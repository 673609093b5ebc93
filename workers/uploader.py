"""Carries events from the relay to the store in batches, through broker outages; keeps the full record on disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

import orjson

from service.jobs.events import Event, ProgressEvent
from service.jobs.records import AttemptRef, Superseded
from service.jobs.store import Attempts, StoreUnavailable
from workers import wire
from workers.outage import insist

_BATCH = 256
_INTERVAL_S = 0.1
_PATIENCE_S = 600.0
"""How long a batch is tried; far beyond any lease, after which the attempt is lost anyway."""
_EXPENDABLE = frozenset({"log", "span", "metric", "progress", "search"})


logger = logging.getLogger(__name__)


class Uploader:
    """Call :meth:`put` from the event loop; :meth:`run` sends at most ten batches a second, the first one at once.

    Of the progress in a batch only the newest is sent.

    While the broker is away up to ``capacity`` events wait; beyond that, what can be missed live is left to the record.
    ``lost`` is called when the attempt turns out to be superseded: nothing is sent any more.
    """

    def __init__(
        self,
        attempts: Attempts,
        ref: AttemptRef,
        record: Path,
        lost: Callable[[], None],
        capacity: int = 50_000,
    ) -> None:
        self._attempts, self._ref, self._lost_to = attempts, ref, lost
        self._file = record.open("ab")
        self._queue: deque[Event] = deque()
        self._capacity = capacity
        self._missed = 0
        self._batch = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._lost = False

    def put(self, event: Event) -> None:
        """Record and relay an event."""
        self.record(event)
        if self._lost or (len(self._queue) >= self._capacity and event["type"] in _EXPENDABLE):
            self._missed += 1
            return
        self._queue.append(event)
        self._wake.set()

    async def run(self) -> None:
        """Send until closed and empty, or superseded."""
        while await self._something():
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH))]
            self._write(lambda file: file.flush())
            await self._send(batch)
            if len(self._queue) < _BATCH and not self._closing:
                await asyncio.sleep(_INTERVAL_S)
        self._write(lambda file: file.close())

    def close(self) -> None:
        """No more events will come; :meth:`run` ends when all are sent."""
        if self._missed and not self._lost:
            notice = wire.log_event(f"{self._missed} events were not relayed; they are in the attempt's record")
            self._queue.append(notice)
        self._closing = True
        self._wake.set()

    async def _something(self) -> bool:
        while not self._queue and not self._closing and not self._lost:
            self._wake.clear()
            await self._wake.wait()
        return bool(self._queue) and not self._lost

    async def _send(self, batch: list[Event]) -> None:
        self._batch += 1
        newest = next((event for event in reversed(batch) if event["type"] == "progress"), None)
        told = [event for event in batch if event["type"] != "progress" or event is newest]
        progress = cast(ProgressEvent | None, newest)
        try:
            await insist(_PATIENCE_S, self._attempts.emit, self._ref, told, progress, self._batch)
        except Superseded:
            self._lost = True
            self._queue.clear()
            self._lost_to()
        except StoreUnavailable:
            self._missed += len(batch)

    def record(self, event: Event) -> None:
        """Only write an event to the attempt's record: the store puts it into the stream itself."""
        line = orjson.dumps(event, default=repr, option=orjson.OPT_APPEND_NEWLINE)
        self._write(lambda file: file.write(line))

    def _write(self, act: Callable[[IO[bytes]], object]) -> None:
        """A full disk ends the record, not the job."""
        if self._file.closed:
            return
        try:
            act(self._file)
        except OSError as error:
            logger.warning("the record of %s ends here: %s", self._ref, error)
            with contextlib.suppress(OSError):
                self._file.close()
