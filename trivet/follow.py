"""Follows live events over broken connections and restarted services, without losing or repeating one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx2

from service.jobs.events import STREAM_PING_S
from trivet.connection import Connection
from trivet.errors import Refused, Unreachable

_SILENCE_S = 3 * STREAM_PING_S
"""A stream that misses three pings is dead."""
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)


def follow(
    connection: Connection,
    path: str,
    params: Mapping[str, Any],
    *,
    give_up_after_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[dict[str, Any]]:
    """Yield events until the stream's end. A gap appears as ``{"type": "gap", …}``.

    A lost connection resumes where it broke. Raises :class:`Unreachable` if the service does not answer for
    ``give_up_after_s`` seconds (by default those of the connection), and :class:`Refused` if it refuses.
    """
    most_s = connection.patience.outage_s if give_up_after_s is None else give_up_after_s
    last_id, failures = "", 0
    lost_since: float | None = None
    while True:
        try:
            for event in _events(connection, path, params, last_id):
                failures, lost_since = 0, None
                if event.event == "end":
                    return
                if event.event == "bye":
                    break
                last_id = event.id or last_id
                if event.data:
                    yield {"type": event.event, **_object(event)}
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and error.status not in (429, 502, 503, 504):
                raise
            lost_since = time.monotonic() if lost_since is None else lost_since
            if (away_s := time.monotonic() - lost_since) > most_s:
                raise error.after(away_s) from error
        sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
        failures += 1


def _events(
    connection: Connection, path: str, params: Mapping[str, Any], last_id: str
) -> Iterator[httpx2.ServerSentEvent]:
    headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
    timeout = httpx2.Timeout(_SILENCE_S, connect=5.0)
    with connection.stream(path, params=params, headers=headers, timeout=timeout) as response:
        yield from httpx2.EventSource(response)


def _object(event: httpx2.ServerSentEvent) -> dict[str, Any]:
    data = event.json()
    return data if isinstance(data, dict) else {}
