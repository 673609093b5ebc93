"""Claims the part of an attempt that a supervisor is to run, and repeats calls while the broker is away."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from service.jobs.disk import DISK_FULL, full_disk
from service.jobs.layout import DataLayout
from service.jobs.records import Claim, JobError, PartOutcome, Superseded, UnknownSpec
from service.jobs.store import Store, StoreUnavailable
from workers.linux import uptime
from workers.supervisor.settings import SupervisorOrder, SupervisorSettings

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


async def give_back(order: SupervisorOrder, error: OSError, settings: SupervisorSettings) -> None:
    """Claim the ordered part, only to report that this host cannot even enter it among those that it supervises."""
    store = Store.connect(order.broker_url, DataLayout(Path(order.data)), order.limits)
    if await claim_part(store, order, settings) is not None:
        full = full_disk(error, Path(order.data))
        said = JobError(type=DISK_FULL if full else type(error).__name__, message=full or str(error))
        await retry_until(
            settings.report_within_s, store.attempts.finish, order.ref, PartOutcome(status="lost", error=said)
        )
    store.close()


async def claim_part(store: Store, order: SupervisorOrder, settings: SupervisorSettings) -> tuple[Claim, float] | None:
    """Return the claim on the ordered part and the :func:`uptime` just before the call, or None if it was refused.

    The store counts the lease from a later moment.
    """
    supervisor = f"{order.host}:{os.getpid()}:{uuid.uuid4().hex}"

    def ask() -> tuple[Claim, float]:
        asked_at = uptime()
        return store.attempts.claim(order.ref, supervisor), asked_at

    try:
        return await retry_until(settings.claim_within_s, ask)
    except Superseded as refusal:
        logger.info("not claimed: %s", refusal)
    except StoreUnavailable as outage:
        logger.warning("%s was not claimed: %s", order.ref, outage)
    except UnknownSpec as refusal:
        failed = PartOutcome(status="failed", error=JobError(type="UnknownSpec", message=str(refusal)))
        await retry_until(settings.report_within_s, store.attempts.finish, order.ref, failed)
    return None


async def retry_until(within_s: float, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a blocking store call in a thread until it gets through.

    Raises :class:`StoreUnavailable` after ``within_s`` seconds, and any other error at once. The call must bear
    repetition: one that timed out may have taken effect.
    """
    deadline = time.monotonic() + within_s
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return await asyncio.to_thread(call, *args, **kwargs)
        except StoreUnavailable:
            if time.monotonic() + pause > deadline:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
