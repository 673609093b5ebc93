"""A host is cut off from the broker and joined to it again, while the rest of the service goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from network_link import NetworkLink, network_link
from waiting import LIMIT_S, eventually
from worker_fleet import HOST, SHORT_LEASES, Fleet, Worker, processes_of, train_spec

from service.jobs.records import AttemptRef
from service.jobs.store import StoreLimits

pytestmark = [pytest.mark.distributed, pytest.mark.waits]


@pytest.fixture
def limits() -> StoreLimits:
    return SHORT_LEASES


@pytest.fixture
def link(fleet: Fleet) -> Iterator[NetworkLink]:
    with network_link(fleet.url) as link:
        yield link


@pytest.fixture
def far(fleet: Fleet, link: NetworkLink) -> Fleet:
    """The same fleet, as hosts see it that the link joins to the broker."""
    return replace(fleet, url=link.url)


@pytest.mark.slow
@pytest.mark.parametrize("limits", [StoreLimits(lease_s=60.0)], ids=["time to heal"])
def test_a_cut_shorter_than_the_lease_costs_nothing(fleet: Fleet, far: Fleet, link: NetworkLink) -> None:
    ref = fleet.submit("until_told")
    supervisor = far.supervise(ref)
    eventually(lambda: fleet.events(ref, "metric"))
    ranks = {process.pid for process in processes_of(ref)}
    link.cut()
    time.sleep(6.0)  # longer than an answer of the broker may take
    seen = len(fleet.events(ref, "metric"))
    link.heal()
    eventually(lambda: len(fleet.events(ref, "metric")) > seen)
    assert {process.pid for process in processes_of(ref)} == ranks
    (fleet.data.job(ref.job_id).root / "go").touch()
    job = fleet.ended(ref)
    assert (job.state, job.attempt) == ("succeeded", 1)
    assert job.result is not None
    steps = [event["step"] for event in fleet.events(ref, "metric")]
    assert steps == list(range(1, job.result["steps"] + 1))
    assert supervisor.wait(LIMIT_S) == 0


@pytest.mark.slow(30)
def test_a_host_that_is_cut_off_ends_its_part_before_it_is_given_away(
    fleet: Fleet, far: Fleet, link: NetworkLink, tmp_path: Path
) -> None:
    """Its job goes on elsewhere, and the host takes work again once it is back."""
    worker = Worker(far, tmp_path / "agent.log")
    try:
        job, _ = fleet.store.jobs.submit(train_spec("until_told"), "tester")
        ref = AttemptRef(job.id, 1, HOST)
        eventually(lambda: fleet.events(ref, "metric"))
        link.cut()
        elsewhere = AttemptRef(job.id, 2, "beta")

        def given_away() -> bool:
            fleet.store.attempts.reap()
            fleet.beat("beta")
            return job.id in fleet.store.attempts.place()

        eventually(given_away)
        assert processes_of(ref) == []
        fleet.supervise(elsewhere)
        eventually(lambda: fleet.job(ref).state == "running")
        link.heal()
        eventually(lambda: {host.name for host in fleet.store.hosts.list() if host.alive} >= {HOST})
        (fleet.data.job(ref.job_id).root / "go").touch()
        ended = fleet.ended(ref)
        assert (ended.state, ended.attempt) == ("succeeded", 2)
        eventually(lambda: {host.name: host for host in fleet.store.hosts.list()}[HOST].held == ())
    finally:
        link.heal()
        assert worker.end() == 0, worker.said()


@pytest.mark.slow(25)
def test_one_host_of_a_gang_that_is_cut_off_ends_the_attempt_on_both(
    fleet: Fleet, far: Fleet, link: NetworkLink
) -> None:
    fleet.slots = 1
    fleet.beat("beta")
    ref = fleet.submit("waiting", ranks=2, max_hosts=2)
    near_part, far_part = (replace(ref, host=host) for host in (HOST, "beta"))
    supervisors = [fleet.supervise(near_part), far.supervise(far_part)]
    eventually(lambda: sum("met the others" in event["line"] for event in fleet.events(ref, "log")) == 2)
    link.cut()
    eventually(fleet.store.attempts.reap)
    eventually(lambda: processes_of(ref) == [])
    link.heal()
    assert [supervisor.wait(LIMIT_S) for supervisor in supervisors] == [0, 0]
    eventually(lambda: fleet.store.attempts.reap() or fleet.job(ref).state == "queued")
    job = fleet.job(ref)
    assert "queued again without using a retry" in (job.reason or "")
