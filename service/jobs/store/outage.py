"""Waits for a broker that restarts: a connection that was not made has sent nothing, so it may be tried again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio as redis_async

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


@dataclass(frozen=True)
class BrokerTimeouts:
    """Bounds how long the broker may take, in seconds, before it counts as unavailable."""

    connect_s: float = 2.0
    reply_s: float = 5.0
    health_check_s: int = 30
    """A connection that was idle for longer is tried before it is used."""
    outage_s: float = 0.0
    """Wait so long, from when it went away, for a broker that accepts no connection or is reading its data."""

    def of_a_pool(self) -> dict[str, Any]:
        """Return the arguments of a pool of connections, whose answers are text."""
        waits = {"socket_connect_timeout": self.connect_s, "socket_timeout": self.reply_s}
        return {**waits, "health_check_interval": self.health_check_s, "decode_responses": True, "protocol": 2}


@dataclass
class BrokerOutage:
    """Limits the wait for one broker, in seconds from when it was first found away: late callers in a long
    outage do not wait, and threads do not pile up. Thread-safe.
    """

    patience_s: float
    _since: float | None = None
    _pause_s: float = _FIRST_PAUSE_S

    def pause(self) -> float | None:
        """Note a failure; return how long to sleep before the next try, or ``None`` if patience is over."""
        now = time.monotonic()
        since = self._since if self._since is not None else now
        self._since = since
        if now - since >= self.patience_s:
            return None
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return self._pause_s

    def end(self) -> None:
        """Note that the broker answers."""
        self._since, self._pause_s = None, _FIRST_PAUSE_S


class PatientPool(redis.ConnectionPool):
    """Connections for threads, which wait during an outage."""

    outage: BrokerOutage

    def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> Any:
        """Return a connection that is connected. Raises the library's error once patience is over."""
        while True:
            try:
                connection = super().get_connection()
            except redis.AuthenticationError:
                raise
            except (redis.ConnectionError, redis.TimeoutError):
                if (pause := self.outage.pause()) is None:
                    raise
                time.sleep(pause)
            else:
                self.outage.end()
                return connection


class PatientAsyncPool(redis_async.BlockingConnectionPool):
    """Waits like :class:`PatientPool`, for clients of one event loop."""

    outage: BrokerOutage

    async def ensure_connection(self, connection: Any) -> None:
        """Connect. Raises the library's error once patience is over."""
        while True:
            try:
                await super().ensure_connection(connection)
            except redis.AuthenticationError:
                raise
            except (redis.ConnectionError, redis.TimeoutError, OSError):
                if (pause := self.outage.pause()) is None:
                    raise
                await asyncio.sleep(pause)
            else:
                self.outage.end()
                return
