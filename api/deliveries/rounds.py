"""Sends due deliveries, round by round, in a task of an API process's event loop."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass

from service.jobs.store import StoreUnavailable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundTimes:
    """Pauses between rounds, in seconds."""

    look_s: float = 1.0
    """Pause between two searches for due deliveries."""
    outage_s: float = 5.0
    """Pause after the broker did not answer."""


class DeliveryRounds(ABC):
    """Every process has such a task: the broker gives each due delivery to one of them at a time."""

    def __init__(self, subject: str, times: RoundTimes) -> None:
        self._subject, self._pauses = subject, times
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; deliveries under way are due again, for another process or for the next one."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            try:
                pause = 0.0 if await self._round() else self._pauses.look_s
            except StoreUnavailable:
                pause = self._pauses.outage_s
            except Exception:
                log.exception("%s: a round failed", self._subject)
                pause = self._pauses.outage_s
            await asyncio.sleep(pause)

    @abstractmethod
    async def _round(self) -> bool:
        """Send what is due; return whether there may be more."""
