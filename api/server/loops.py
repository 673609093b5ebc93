"""Repeats the work that an API process does beside its requests, whatever fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from service.jobs.store import StoreUnavailable

log = logging.getLogger(__name__)


async def repeat(work: Callable[[], Awaitable[float | None]], failed_s: float) -> None:
    """Do a piece of work again and again. It returns the seconds until the next, or ``None`` when it is done.

    One that fails is done again after ``failed_s`` seconds. Its error is logged, once until another comes or it is
    over, except that the broker is away.
    """
    pause: float | None = 0.0
    told = ""
    while pause is not None:
        await asyncio.sleep(pause)
        try:
            pause, told = await work(), ""
        except StoreUnavailable:
            pause = failed_s
        except Exception as error:
            if repr(error) != told:
                log.exception("%s failed, and is done every %s s", getattr(work, "__qualname__", work), failed_s)
            pause, told = failed_s, repr(error)
