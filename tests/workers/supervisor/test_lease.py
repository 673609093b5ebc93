"""A lease by a clock that the test moves: how long a group is let run, and that a lease which is over stays so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from waiting import eventually

from service.jobs.records import AttemptRef
from service.jobs.store import StoreUnavailable
from workers.supervisor import lease as leases
from workers.supervisor.lease import Lease

ASKED_AT = 100.0


class World:
    """The time, a store that can be away, and all that a lease of one second has said."""

    def __init__(self) -> None:
        self.now, self.away, self.directive = ASKED_AT, False, "run"
        self.renewals, self.renewal_takes = 0, 0.0
        self.allowed: list[float] = []
        self.told: list[str] = []
        attempts: Any = self
        self.lease = Lease(
            attempts, AttemptRef("job_1", 1, "h"), 1.0, ASKED_AT, extend=self.allowed.append, tell=self.told.append
        )

    def renew(self, _: AttemptRef) -> str:
        self.renewals += 1
        self.now += self.renewal_takes
        if self.away:
            raise StoreUnavailable("the broker does not answer")
        return self.directive

    def renewed_twice(self) -> bool:
        """Whether a renewal began and ended after this call."""
        before = self.renewals
        return eventually(lambda: self.renewals >= before + 2)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(leases, "uptime", lambda: world.now)
    world.lease.start()
    yield world
    world.lease.end()


def test_every_renewal_lets_the_group_run_for_most_of_a_lease_from_when_it_was_sent(world: World) -> None:
    assert world.allowed[0] == ASKED_AT + 0.8
    for now in (ASKED_AT + 0.5, ASKED_AT + 1.2, ASKED_AT + 1.9):
        world.now = now
        assert eventually(lambda now=now: world.allowed[-1] == now + 0.8)
    assert set(world.told) == {"run"}
    assert not world.lease.is_over


def test_an_answer_that_was_long_on_its_way_lets_the_group_run_no_longer(world: World) -> None:
    world.renewal_takes = 0.25
    assert eventually(lambda: len(world.allowed) >= 3)
    assert world.allowed[-1] < world.now + 0.8


def test_a_lease_that_was_not_renewed_in_time_is_over_for_good(world: World) -> None:
    world.away = True
    world.renewed_twice()
    world.now = world.allowed[-1] - 0.1
    world.renewed_twice()
    assert not world.lease.is_over
    world.now += 0.1
    eventually(lambda: "lease_expired" in world.told)
    allowed = list(world.allowed)
    world.away = False
    world.renewed_twice()
    assert world.lease.is_over
    assert world.allowed == allowed


def test_an_attempt_that_is_lost_is_let_run_no_longer(world: World) -> None:
    world.directive = "lost"
    eventually(lambda: "lost" in world.told)
    allowed = list(world.allowed)
    world.now += 0.1
    world.renewed_twice()
    assert world.allowed == allowed
