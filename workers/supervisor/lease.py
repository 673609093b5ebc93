"""Keeps a claimed part alive at the store, and ends its group in time when that does not succeed.

A lease's length comes with the claim: it is the setting ``lease_s``, whose default is that of
:class:`service.jobs.store_limits.StoreLimits`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Literal

from service.jobs.records import AttemptRef, Directive
from service.jobs.store import Attempts, StoreUnavailable
from workers.linux import uptime

_RENEWALS_PER_LEASE = 5
_RENEWAL_DEADLINE = 0.8
"""The part of the lease after which, without a renewal, the group must be gone: the store gives it away at 1.0."""

News = Directive | Literal["lease_expired"]

logger = logging.getLogger(__name__)


class Lease:
    """Renews in a thread that touches no disk, so that nothing but the broker can hold it up.

    ``extend`` gets, at once and after every renewal, the :func:`uptime` until which the group may run: whoever holds
    that deadline ends the group by itself, even if this process does not run. ``tell`` gets every directive, and
    ``lease_expired`` when the deadline has passed. Both are called in threads of this object.

    ``asked_at`` is the :func:`uptime` just before the claim was sent. The store grants the lease at some later moment,
    so the group, whose deadline counts from here, is gone before the lease is given away.
    """

    def __init__(
        self,
        attempts: Attempts,
        ref: AttemptRef,
        lease_s: float,
        asked_at: float,
        *,
        extend: Callable[[float], None],
        tell: Callable[[News], None],
    ) -> None:
        self._attempts, self._ref, self._lease_s = attempts, ref, lease_s
        self._extend, self._tell = extend, tell
        self._until = asked_at + _RENEWAL_DEADLINE * lease_s
        self._lapsed = False
        self._ended = threading.Event()

    @property
    def is_over(self) -> bool:
        """Return whether the group's deadline has ever passed. No later renewal undoes that: the group is gone."""
        return self._lapsed or uptime() >= self._until

    def start(self) -> None:
        """Begin to renew, until :meth:`end`."""
        self._extend(self._until)
        for work in (self._renew_forever, self._watch):
            threading.Thread(target=work, name=f"trivet-lease{work.__name__}", daemon=True).start()

    def end(self) -> None:
        """Renew no more."""
        self._ended.set()

    def _renew_forever(self) -> None:
        pause = 0.0
        while not self._ended.wait(pause):
            try:
                pause = self._renew()
            except Exception:
                logger.exception("the lease was not renewed")
                pause = 1.0

    def _renew(self) -> float:
        """Renew once; return how long to wait before the next time."""
        sent_at = uptime()
        try:
            directive = self._attempts.renew(self._ref)
        except StoreUnavailable:
            return min(self._lease_s / (4 * _RENEWALS_PER_LEASE), 1.0)
        self._lapsed = self.is_over
        if not self._lapsed and directive != "lost":
            self._until = sent_at + _RENEWAL_DEADLINE * self._lease_s
            self._extend(self._until)
        self._tell(directive)
        return self._lease_s / _RENEWALS_PER_LEASE

    def _watch(self) -> None:
        """Watch the deadline beside the renewals, one of which may hang as long as the broker does."""
        while not self._ended.wait(max(0.0, self._until - uptime())):
            if self.is_over:
                self._tell("lease_expired")
                return
