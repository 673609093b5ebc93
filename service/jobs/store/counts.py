"""Keeps the counts of all processes in one place, so that every API process exports the same sums, whichever is asked
and whichever ended meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from service.jobs.monitoring.meter import Meter
from service.jobs.monitoring.numbers import Numbers, from_counts
from service.jobs.store import stubs
from service.jobs.store.client import BrokerClient, StoreUnavailable
from service.jobs.store.keyspace import COUNTS


@dataclass(frozen=True)
class Counts:
    """Adds and reads. The scripts count there themselves what happens in them."""

    client: BrokerClient

    def add(self, meter: Meter) -> None:
        """Add what a process counted. While the broker is away the meter keeps it; raises :class:`StoreUnavailable`.

        A call whose answer was lost may have been counted, and is counted again: rather twice than not at all.
        """
        counted = meter.take()
        if not counted:
            return
        try:
            stubs.add_counts(self.client, orjson.dumps(counted).decode())
        except StoreUnavailable:
            meter.give_back(counted)
            raise

    def numbers(self) -> Numbers:
        """Return the sums over all processes, since the data folder was made."""
        return from_counts(self.client.call("HGETALL", COUNTS()))
