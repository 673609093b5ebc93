"""A lease by a clock that the test moves: how long a group is let run, and that a lease which is over stays so; and how
long a host of a gang that may have failed by another's fault waits for that one's lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import eventually

from service.jobs.records import AttemptRef
from service.jobs.store import StoreUnavailable
from workers.supervisor import lease as leases
from workers.supervisor.lease import Lease, let_others_speak_first
from workers.supervisor.settings import SupervisorSettings

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


class Gang:
    """A store whose answers to renewals a test gives, one a second, the last one for ever; ``None`` is an outage."""

    def __init__(self, *answers: str | None) -> None:
        self._answers = list(answers)
        self.now, self.renewals, self.reaped = 0.0, 0, False

    def renew(self, _: AttemptRef) -> str:
        self.now += 1.0
        self.renewals += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            raise StoreUnavailable("the broker does not answer")
        return answer

    def reap(self) -> list[str]:
        self.reaped = True
        return []

    def wait(self, monkeypatch: pytest.MonkeyPatch, *, is_lost: bool = False) -> None:
        """Wait for the others, whose leases last three seconds, for two seconds longer."""
        monkeypatch.setattr(leases, "uptime", lambda: self.now)
        settings = SupervisorSettings(others_within_s=2.0, write_interval_s=0.0, report_within_s=20.0)
        attempts: Any = self
        claim: Any = SimpleNamespace(ref=AttemptRef("job_1", 1, "h"), lease_s=3.0)
        asyncio.run(let_others_speak_first(attempts, claim, settings, SimpleNamespace(is_lost=is_lost)))


@pytest.mark.parametrize(
    ("answers", "renewals", "reaped"),
    [
        (["run", "run", "stop"], 3, False),
        (["run"], 5, True),
        (["run", None, None, "run", "stop"], 5, False),
        (["run", "run", "run", None, "run"], 9, True),
        ([None], 20, True),
    ],
    ids=["another is heard", "nobody is", "outage", "wait from its end on", "outage without end"],
)
def test_a_host_waits_for_others_a_lease_and_more_after_any_outage_then_looks_for_ended_leases(
    answers: list[str | None], renewals: int, reaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = Gang(*answers)
    gang.wait(monkeypatch)
    assert (gang.renewals, gang.reaped) == (renewals, reaped)


def test_a_host_that_has_lost_the_attempt_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    gang = Gang("run")
    gang.wait(monkeypatch, is_lost=True)
    assert gang.renewals == 0
