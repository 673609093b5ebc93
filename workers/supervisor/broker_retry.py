"""Repeats a call of the store while the broker is away, with growing pauses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from service.jobs.store import StoreUnavailable

P = ParamSpec("P")
R = TypeVar("R")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


async def retry_until(within_s: float, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a blocking store call in a thread until it gets through.

    Raises :class:`StoreUnavailable` when ``within_s`` seconds did not suffice, and at once whatever else it raises.
    The call must bear repetition: one that timed out may have taken effect.
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
