"""Sends due deliveries, round by round, in a task of an API process's event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx2

from api.deliveries.addresses import ForbiddenTarget
from api.server import repeat
from service.jobs.records.webhooks import RetrySchedule
from service.jobs.settings import Settings
from service.jobs.store import Store

FAILURES = (ForbiddenTarget, OSError, ValueError, httpx2.HTTPError, httpx2.InvalidURL)
"""What may go wrong with one delivery, and must not keep others from being sent. ``ValueError``: something has
characters that a protocol cannot carry, such as a password of a mail server.
"""


@dataclass(frozen=True)
class RoundTimes:
    """Pauses between rounds, in seconds."""

    look_s: float = 1.0
    """Pause between two searches for due deliveries."""
    outage_s: float = 5.0
    """Pause after the broker did not answer."""


Times = TypeVar("Times", bound=RoundTimes)


class DeliveryRounds(ABC, Generic[Times]):
    """Every process has such a task: the broker gives each due delivery to one of them at a time. ``retry_hours`` is
    for how long one that fails is tried again.
    """

    def __init__(self, settings: Settings, store: Store, times: Times, *, retry_hours: float) -> None:
        self._settings, self._store, self._times = settings, store, times
        self._allowed = settings.webhook_networks
        self._schedule = RetrySchedule(retry_hours * 3600)
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
        await repeat(self._paced_round, self._times.outage_s)

    async def _paced_round(self) -> float:
        return 0.0 if await self._round() else self._times.look_s

    @abstractmethod
    async def _round(self) -> bool:
        """Send what is due; return whether there may be more."""
