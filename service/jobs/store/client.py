"""The only client of Redis: thread-safe, with explicit timeouts and the domain's exceptions."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from service.causes import causes
from service.jobs.records import Conflict, NotFound, OverQuota, Superseded
from service.jobs.store.loop_calls import LoopCall, SharedTrips, current_call
from service.jobs.store.outage import BrokerOutage, BrokerTimeouts, PatientPool

_REFUSALS: dict[str, type[Exception]] = {
    "NOTFOUND": NotFound,
    "CONFLICT": Conflict,
    "SUPERSEDED": Superseded,
    "QUOTA": OverQuota,
}
_UNABLE = ("MISCONF", "OOM", "READONLY", "LOADING", "BUSY", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN")

_REFUSED_IN_SCRIPT = "ACL failure in script"


class StoreUnavailable(Exception):  # noqa: N818
    """The broker cannot be reached, or cannot write. Whether the last command took effect is unknown."""


class BrokerRefused(StoreUnavailable):
    """The broker answers, but does not admit us: another password, certificate or set of access rules is needed."""


class BrokerCannotWrite(StoreUnavailable):
    """The broker answers, but takes no writes now: its disk or its memory is full, or it is starting or a replica."""


class BrokerClient:
    """Commands and scripts over a connection pool; thread-safe. Calls that run in an event loop
    (:mod:`~service.jobs.store.loop_calls`) share connections of their own, until :meth:`leave_loop`.

    A command that timed out is never repeated unasked: it may have taken effect. One that could not be sent, or
    arrived while the broker was reading its data, had no effect, and is tried for ``outage_s``.
    """

    def __init__(self, url: str, timeouts: BrokerTimeouts | None = None) -> None:
        timeouts = timeouts or BrokerTimeouts()
        self._pool = PatientPool.from_url(url, retry=Retry(NoBackoff(), 0), **timeouts.of_a_pool())
        self._pool.outage = BrokerOutage(timeouts.outage_s)
        self._redis = redis.Redis.from_pool(self._pool)
        self._url = url
        self._timeouts = timeouts
        self._trips: dict[asyncio.AbstractEventLoop, SharedTrips] = {}

    def call(self, *words: str | int | float | bytes) -> Any:
        """Run one command; strings come back as ``str``. Raises :class:`StoreUnavailable`."""
        with translated():
            return self._run(*words)

    def script(self, sha: str, text: str, arguments: Sequence[object]) -> Any:
        """Run a script by its hash, sending its text only when the server does not know it yet.

        A script refuses with an error whose first word is a code; it raises the exception of that code.
        """
        words = [str(argument) for argument in arguments]
        with translated():
            try:
                return self._run("EVALSHA", sha, 0, *words)
            except redis.exceptions.NoScriptError:
                return self._run("EVAL", text, 0, *words)

    def _run(self, *words: str | int | float | bytes) -> Any:
        call = current_call()
        while True:
            try:
                if call is not None:
                    return self._trips_of(call).ask(call, words)
                return self._redis.execute_command(*words)  # type: ignore[no-untyped-call]  # the library has no types
            except redis.BusyLoadingError:
                if (pause := self._pool.outage.pause()) is None:
                    raise
                (time if call is None else call).sleep(pause)

    def _trips_of(self, call: LoopCall) -> SharedTrips:
        if call.loop not in self._trips:
            open_ones = {loop: trips for loop, trips in self._trips.items() if not loop.is_closed()}
            self._trips = {**open_ones, call.loop: SharedTrips(self._url, self._timeouts)}
        return self._trips[call.loop]

    async def leave_loop(self) -> None:
        """Close the connections of calls that run in this event loop, before it ends."""
        if (trips := self._trips.pop(asyncio.get_running_loop(), None)) is not None:
            await trips.close()

    def close(self) -> None:
        self._redis.close()


@contextmanager
def translated() -> Iterator[None]:
    """Turn the client library's exceptions into the domain's."""
    try:
        yield
    except redis.AuthenticationError as error:
        raise BrokerRefused(f"the broker rejects this user or this password: {error}") from error
    except redis.exceptions.NoPermissionError as error:
        raise BrokerRefused(f"the broker does not let this user do that: {error}") from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        if (reason := _tls_refusal(error)) is not None:
            raise BrokerRefused(f"no TLS with the broker ({reason}); see TRIVET_BROKER_CA_CERT") from error
        raise StoreUnavailable(f"the broker does not answer: {error}") from error
    except redis.ResponseError as error:
        if str(error).startswith(_REFUSED_IN_SCRIPT):
            raise BrokerRefused(f"the broker does not let this user do that: {error}") from error
        code, _, message = str(error).partition(" ")
        if code in _REFUSALS:
            raise _REFUSALS[code](message) from None
        if code in _UNABLE or isinstance(error, redis.exceptions.ReadOnlyError | redis.exceptions.OutOfMemoryError):
            raise BrokerCannotWrite(f"the broker cannot take this now: {error}") from error
        raise


def _tls_refusal(error: BaseException) -> str | None:
    """Return why one side refused the other's certificate or its kind of TLS, if that caused ``error``; a
    connection that merely broke may succeed the next time.
    """
    for cause in causes(error):
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return str(cause)
    return None
