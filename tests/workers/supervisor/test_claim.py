"""A claim: when it was asked for, and which ranks it is about."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from worker_fleet import train_spec

from service.jobs.records import AttemptRef, Claim, HostShare
from service.jobs.store import StoreLimits, StoreUnavailable
from service.linux import uptime
from workers.supervisor.lease import claim_part
from workers.supervisor.settings import SupervisorOrder, SupervisorSettings

REF = AttemptRef("job_1", 1, "b")
SHARES = tuple(
    HostShare(host=host, devices=devices) for host, devices in (("a", (0, 1)), ("b", (3, 4, 5)), ("c", (0,)))
)
CLAIM = Claim(REF, train_spec("x"), SHARES, "127.0.0.1", 15.0)


class LateBroker:
    """A store's attempts that answer only the third time, and note when that was asked."""

    def __init__(self) -> None:
        self.tries = 0
        self.before_last = 0.0

    def claim(self, ref: AttemptRef, supervisor: str) -> Claim:
        self.tries += 1
        if self.tries < 3:
            self.before_last = uptime()
            raise StoreUnavailable("the broker does not answer")
        return CLAIM


def test_a_lease_counts_from_when_the_claim_that_got_through_was_sent(tmp_path: Path) -> None:
    attempts = LateBroker()
    store: Any = type("Store", (), {"attempts": attempts})
    order = SupervisorOrder("job_1", 1, "b", "127.0.0.1", "unix:///s", str(tmp_path), 1.0, StoreLimits())
    granted = asyncio.run(claim_part(store, order, SupervisorSettings()))
    assert granted is not None
    claim, asked_at = granted
    assert claim is CLAIM
    assert attempts.before_last < asked_at <= uptime()


def test_the_ranks_of_a_share_follow_those_of_the_hosts_before() -> None:
    on = {host: dataclasses.replace(CLAIM, ref=AttemptRef("job_1", 1, host)) for host in "abc"}
    assert {host: claim.ranks for host, claim in on.items()} == {"a": range(2), "b": range(2, 5), "c": range(5, 6)}
    assert {host: claim.leads for host, claim in on.items()} == {"a": True, "b": False, "c": False}
