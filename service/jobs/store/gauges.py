"""Numbers about the whole service, for monitoring."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from service.jobs.states import STATES, JobState
from service.jobs.store.client import Client, StoreUnavailable
from service.jobs.store.keyspace import JOBS_BY, PENDING, PREFIX

_SECONDS_PER_PRIORITY = 10**10
"""A priority step in the score of a pending job, which counts milliseconds: 1e13 of them."""


@dataclass(frozen=True)
class Gauges:
    """Read at each scrape; nothing is counted in the process."""

    client: Client

    def jobs(self) -> dict[JobState, int]:
        """Jobs by state."""
        return {state: int(self.client.call("ZCARD", JOBS_BY(f"state:{state}"))) for state in STATES}

    def oldest_wait_s(self) -> float:
        """How long the job that has waited longest for devices has waited; 0 when none waits."""
        pending = self.client.call("ZRANGE", PENDING(), 0, -1, "WITHSCORES")
        step = _SECONDS_PER_PRIORITY * 1000
        seconds, microseconds = self.client.call("TIME")
        now_ms = int(seconds) * 1000 + int(microseconds) // 1000
        queued_ms = [_queued_ms(float(score), step) for score in pending[1::2]]
        return max(0.0, (now_ms - min(queued_ms)) / 1000) if queued_ms else 0.0

    def round_trip_s(self) -> float:
        """Write a value and read it back; seconds it took. Raises :class:`StoreUnavailable`."""
        key, value = f"{PREFIX}ready:{secrets.token_hex(8)}", secrets.token_hex(8)
        started = time.monotonic()
        self.client.call("SET", key, value, "PX", 1000)
        if self.client.call("GETDEL", key) != value:
            raise StoreUnavailable("the broker did not give back what was written")
        return time.monotonic() - started


def _queued_ms(score: float, step: int) -> float:
    """The queueing time within ``-priority·step + milliseconds``; milliseconds lie well below a step."""
    return score % step
