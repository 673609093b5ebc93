"""Refused sign-ins by address, counted for all API processes together, so that nobody tries keys for long."""

from __future__ import annotations

import math
from dataclasses import dataclass

from service.jobs.store import stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import SIGN_INS

ALLOWED = 10
WINDOW_S = 60.0


@dataclass(frozen=True)
class SignIns:
    """An address may be refused :data:`ALLOWED` times in :data:`WINDOW_S` seconds; then it has to wait."""

    client: BrokerClient

    def wait_s(self, address: str) -> int:
        """Return whole seconds until this address may try again; 0 when it may now."""
        count, left = self.client.call("GET", SIGN_INS(address)), self.client.call("PTTL", SIGN_INS(address))
        if int(count or 0) < ALLOWED:
            return 0
        return max(math.ceil(int(left) / 1000), 1)

    def refused(self, address: str) -> None:
        """Count a try with a wrong key."""
        stubs.refused_sign_in(self.client, address, round(WINDOW_S * 1000))
