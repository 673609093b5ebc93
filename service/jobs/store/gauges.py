"""Measures the whole service, for monitoring."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from service.jobs.states import STATES, JobState
from service.jobs.store import stubs
from service.jobs.store.client import BrokerClient, StoreUnavailable
from service.jobs.store.keyspace import JOBS_BY, PREFIX


@dataclass(frozen=True)
class Gauges:
    """Read at each scrape; nothing is counted in the process."""

    client: BrokerClient

    def jobs(self) -> dict[JobState, int]:
        """Count jobs by state."""
        return {state: int(self.client.call("ZCARD", JOBS_BY(f"state:{state}"))) for state in STATES}

    def oldest_wait_s(self) -> float:
        """Return how long the job that has waited longest for devices has waited; 0 when none waits."""
        return stubs.oldest_wait(self.client) / 1000

    def round_trip_s(self) -> float:
        """Write a value and read it back; seconds it took. Raises :class:`StoreUnavailable`."""
        key, value = f"{PREFIX}ready:{secrets.token_hex(8)}", secrets.token_hex(8)
        started = time.monotonic()
        self.client.call("SET", key, value, "PX", 1000)
        if self.client.call("GETDEL", key) != value:
            raise StoreUnavailable("the broker did not give back what was written")
        return time.monotonic() - started
