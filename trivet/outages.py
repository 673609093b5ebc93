"""Repeats calls while the service is away: restarting, or without its broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from trivet.errors import Refused, Unreachable

Answer = TypeVar("Answer")
_STATUSES = (502, 503, 504)
"""What the service, or a proxy in front of it, answers in an outage."""
_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_ARRIVAL_S = 2.0
"""A service that never answered is waited for so long: more likely there is none."""


class Patience:
    """Outlasts outages of one service of at most ``outage_s`` seconds. Safe to share between threads."""

    def __init__(
        self,
        outage_s: float,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outage_s = outage_s
        self._sleep = sleep
        self._clock = clock
        self._has_answered = False

    def outlast(self, call: Callable[[], Answer], *, bears_repetition: bool) -> Answer:
        """Return the call's answer, calling again in an outage; one that does not bear repetition only where it never
        reached the service. Raises the last error, with how long it was tried, when the outage lasts.
        """
        began, tries = self._clock(), 0
        while True:
            try:
                answer = call()
            except (Unreachable, Refused) as error:
                self._has_answered |= isinstance(error, Refused)
                if not _is_outage(error) or not (bears_repetition or _was_not_sent(error)):
                    raise
                pause = _PAUSES_S[min(tries, len(_PAUSES_S) - 1)]
                passed = self._clock() - began
                if passed + pause > self.limit_s:
                    raise (error.after(passed) if tries else error) from error.__cause__
                self._sleep(pause)
                tries += 1
            else:
                self._has_answered = True
                return answer

    @property
    def limit_s(self) -> float:
        """Return how long an outage is waited for at present, in seconds."""
        return self.outage_s if self._has_answered else min(self.outage_s, _ARRIVAL_S)


def _is_outage(error: Unreachable | Refused) -> bool:
    return error.passes if isinstance(error, Unreachable) else error.status in _STATUSES


def _was_not_sent(error: Unreachable | Refused) -> bool:
    return isinstance(error, Unreachable) and not error.sent
