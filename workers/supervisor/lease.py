"""Claims a supervisor's part of an attempt, keeps the claim alive at the store, and ends the group in time if
that fails.

A lease's length comes with the claim: it is the setting ``lease_s``, whose default is that of
:class:`service.jobs.records.store_limits.StoreLimits`.
Calls are repeated while the broker does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal, ParamSpec, Protocol, TypeVar

from service.jobs.files import DISK_FULL, DataLayout, full_disk
from service.jobs.records import AttemptRef, Claim, Directive, JobError, PartOutcome, Superseded, UnknownSpec
from service.jobs.store import Attempts, Store, StoreUnavailable
from service.linux import uptime
from workers.supervisor.settings import SupervisorOrder, SupervisorSettings

_RENEWALS_PER_LEASE = 5
_RENEWAL_DEADLINE = 0.8
"""The part of the lease after which, without a renewal, the group must be gone: the store gives it away at 1.0."""

News = Directive | Literal["lease_expired"]

logger = logging.getLogger(__name__)


class Lease:
    """Renews in a thread that touches no disk, so that nothing but the broker can hold it up.

    ``extend`` gets, at once and after every renewal, the :func:`uptime` until which the group may run: whoever
    holds that deadline ends the group by itself, even if this process does not run. ``tell`` gets every
    directive, and ``lease_expired`` once the deadline has passed. Both are called in threads of this object.

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
        """Return whether the group's deadline has ever passed. No later renewal undoes that: the group has ended."""
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
        """Watch the deadline in parallel with renewals, since a renewal may hang as long as the broker does."""
        while not self._ended.wait(max(0.0, self._until - uptime())):
            if self.is_over:
                self._tell("lease_expired")
                return


P = ParamSpec("P")
R = TypeVar("R")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


async def give_back(order: SupervisorOrder, error: OSError, settings: SupervisorSettings) -> None:
    """Claim the ordered part only to report that this host cannot even register it."""
    store = Store.connect(order.broker_url, DataLayout(Path(order.data)), order.limits)
    if await claim_part(store, order, settings) is not None:
        full = full_disk(error, Path(order.data))
        said = JobError(type=DISK_FULL if full else type(error).__name__, message=full or str(error))
        await retry_until(
            settings.report_within_s, store.attempts.finish, order.ref, PartOutcome(status="lost", error=said)
        )
    store.close()


async def claim_part(store: Store, order: SupervisorOrder, settings: SupervisorSettings) -> tuple[Claim, float] | None:
    """Return the claim on the ordered part and the :func:`uptime` just before the call; None if it was refused.

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


class MayBeLost(Protocol):
    """Knows whether a supervisor has lost its attempt."""

    is_lost: bool


async def let_others_speak_first(
    attempts: Attempts, claim: Claim, settings: SupervisorSettings, ending: MayBeLost
) -> None:
    """Wait for the other hosts of a gang, since the first reported fault is the attempt's.

    The host of the rank that failed first may need a moment longer than the others to notice; once it has reported, a
    renewal says ``stop``. A lost host never reports: its lease ends the attempt, and no part is to blame. Leases
    stand still while the broker is away, so the wait begins again when it is back. The worker that reaps leases may
    be away too, so this call reaps them at the end.
    """
    gives_up_at = uptime() + settings.report_within_s
    within_s = settings.others_within_s + claim.lease_s
    until = uptime() + within_s
    while uptime() < min(until, gives_up_at) and not ending.is_lost:
        try:
            if await asyncio.to_thread(attempts.renew, claim.ref) in ("stop", "lost"):
                return
        except StoreUnavailable:
            until = uptime() + within_s
        await asyncio.sleep(settings.write_interval_s)
    with contextlib.suppress(StoreUnavailable):
        await asyncio.to_thread(attempts.reap)


async def let_a_killer_finish(settings: SupervisorSettings) -> None:
    """Wait for the end of this process, if it is to come: a rank that was killed is not to blame then, and the lease
    ends the attempt.
    """
    await asyncio.sleep(settings.kill_settles_s)


async def retry_until(within_s: float, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a blocking store call in a thread until it gets through.

    Raises :class:`StoreUnavailable` after ``within_s`` seconds, and any other error at once. The call must be
    safe to repeat: one that timed out may have taken effect.
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
