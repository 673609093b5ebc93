"""Keeps a claimed part alive at the store, and says when it no longer is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from service.jobs.records import AttemptRef, Directive
from service.jobs.store import Attempts, StoreUnavailable

RENEWALS_PER_LEASE = 5
FENCED_AT = 0.8
"""Part of the lease after which, without a renewal, the group must be gone: the store gives it away at 1.0."""

News = Directive | Literal["fenced"]


class Lease:
    """``tell`` gets every directive, and ``fenced`` once nothing was renewed for 0.8 of the lease.

    ``granted_at`` (monotonic) is when the claim was *sent*: the store's clock for it started later, never earlier.
    """

    def __init__(
        self, attempts: Attempts, ref: AttemptRef, lease_s: float, granted_at: float, tell: Callable[[News], None]
    ) -> None:
        self._attempts, self._ref, self._lease_s, self._tell = attempts, ref, lease_s, tell
        self._granted_at = granted_at

    async def keep(self) -> None:
        """Renew until cancelled."""
        loop = asyncio.get_running_loop()
        fence = loop.call_at(self._fence_at(), self._tell, "fenced")
        try:
            while True:
                await asyncio.sleep(await self._renew())
                fence.cancel()
                fence = loop.call_at(self._fence_at(), self._tell, "fenced")
        finally:
            fence.cancel()

    def _fence_at(self) -> float:
        return self._granted_at + FENCED_AT * self._lease_s

    async def _renew(self) -> float:
        """Renew once; how long to wait before the next time."""
        sent_at = time.monotonic()
        try:
            directive = await asyncio.to_thread(self._attempts.renew, self._ref)
        except StoreUnavailable:
            return min(self._lease_s / (4 * RENEWALS_PER_LEASE), 1.0)
        self._granted_at = sent_at
        self._tell(directive)
        return self._lease_s / RENEWALS_PER_LEASE
