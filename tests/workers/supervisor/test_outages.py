"""A broker that goes away and comes back while a job runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from waiting import LIMIT_S, POLL_S, eventually
from worker_fleet import HOST, SHORT_LEASES, Fleet, MortalBroker, Worker, all_gone, processes_of, train_spec

from service.jobs.records import AttemptRef
from service.jobs.store import StoreUnavailable
from service.jobs.store.keyspace import LEASES

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.waits]


def steps_on_disk(fleet: Fleet, ref: AttemptRef) -> int:
    return (fleet.data.job(ref.job_id).attempt(ref.attempt) / "events.rank-0.jsonl").read_text().count('"metric"')


def waits_for_the_other(fleet: Fleet, ref: AttemptRef) -> None:
    """Its lease is renewed far more often than a group at work needs."""
    seen = set[str]()

    def look() -> bool:
        score = fleet.store.client.call("ZSCORE", LEASES(), str(ref))
        assert score is not None, "it has reported its own end"
        seen.add(score)
        return len(seen) > 3

    eventually(look)


def test_an_outage_shorter_than_the_lease_costs_nothing(outage: Fleet, mortal: MortalBroker) -> None:
    ref = outage.submit("until_told")
    supervisor = outage.supervise(ref)
    eventually(lambda: outage.events(ref, "metric"))
    ranks = {process.pid for process in processes_of(ref)}
    mortal.down()
    reached = steps_on_disk(outage, ref)
    eventually(lambda: steps_on_disk(outage, ref) > reached + 50)
    mortal.up()
    eventually(lambda: len(outage.events(ref, "metric")) > reached + 50)
    assert {process.pid for process in processes_of(ref)} == ranks
    (outage.data.job(ref.job_id).root / "go").touch()
    outage.expect_every_step(ref)
    assert supervisor.wait(LIMIT_S) == 0


@pytest.mark.parametrize("limits", [SHORT_LEASES], ids=["ends"])
def test_an_outage_longer_than_the_lease_ends_the_group_first(outage: Fleet, mortal: MortalBroker) -> None:
    ref = outage.submit("until_told")
    supervisor = outage.supervise(ref)
    eventually(lambda: outage.events(ref, "metric"))
    mortal.down()
    down_at = time.monotonic()
    looked_at = down_at
    while processes_of(ref):
        assert looked_at - down_at < outage.limits.lease_s, "the group outlived its lease"
        looked_at = time.monotonic()
        time.sleep(POLL_S)
    assert supervisor.poll() is None, "the supervisor has yet to report"
    mortal.up()
    eventually(lambda: outage.store.attempts.reap() or outage.job(ref).state == "queued")
    assert supervisor.wait(LIMIT_S) == 0
    job = outage.job(ref)
    assert (job.state, job.attempt) == ("queued", 1)
    assert "lease" in (job.reason or "")


@pytest.mark.parametrize("limits", [SHORT_LEASES], ids=["ends"])
@pytest.mark.parametrize("gone", [False, True], ids=["hangs", "is gone"])
def test_a_job_that_finishes_in_a_gap_of_a_lease_succeeded(outage: Fleet, mortal: MortalBroker, gone: bool) -> None:
    """Also when the job is given up for lost, and placed again, before its supervisor is back."""
    ref = outage.submit("until_told")
    supervisor = outage.supervise(ref)
    eventually(lambda: outage.events(ref, "metric"))
    ranks = processes_of(ref)
    with mortal.away() if gone else mortal.hanging():
        (outage.data.job(ref.job_id).root / "go").touch()
        eventually(lambda: all_gone(ranks))
        time.sleep(outage.limits.lease_s)
        assert supervisor.poll() is None, "the supervisor has yet to report"
    while outage.job(ref).ended_at is None:
        outage.store.attempts.reap()
        outage.beat()
        outage.store.attempts.place()
        time.sleep(POLL_S)
    outage.expect_every_step(ref)
    assert supervisor.wait(LIMIT_S) == 0


def test_a_gang_that_loses_a_supervisor_before_an_outage_is_queued_again(outage: Fleet, mortal: MortalBroker) -> None:
    """The other host's ranks fail in the wake of those that it lost, which is no failure of the job's."""
    outage.slots = 1
    outage.beat("beta")
    ref = outage.submit("exchange", ranks=2, max_hosts=2)
    first, second = (AttemptRef(ref.job_id, 1, share.host) for share in outage.job(ref).placement)
    left, killed = outage.supervise(first), outage.supervise(second)
    eventually(lambda: outage.events(ref, "metric"))
    ranks = processes_of(ref)
    killed.kill()
    eventually(lambda: all_gone(ranks))
    waits_for_the_other(outage, first)
    with mortal.away():
        time.sleep(1.0)
    waits_for_the_other(outage, first)
    outage.expire_lease(second)
    outage.store.attempts.reap()
    eventually(lambda: outage.job(ref).state != "running")
    job = outage.job(ref)
    assert (job.state, job.error) == ("queued", None)
    assert f"the supervisor on host {second.host} stopped renewing its lease" in (job.reason or "")
    assert left.wait(LIMIT_S) == 0


def test_a_supervisor_that_finds_no_broker_waits_for_it(outage: Fleet, mortal: MortalBroker) -> None:
    ref = outage.submit("nothing")
    mortal.down()
    supervisor = outage.supervise(ref)
    entry = outage.data.host(ref.host) / f"{ref.job_id}.1.json"
    eventually(entry.exists)
    with pytest.raises(StoreUnavailable):
        outage.store.client.call("PING")
    mortal.up()
    job = outage.ended(ref)
    assert (job.state, job.result) == ("succeeded", None)
    assert supervisor.wait(LIMIT_S) == 0
    assert not entry.exists()


def test_a_worker_takes_up_its_work_after_an_outage(outage: Fleet, mortal: MortalBroker, tmp_path: Path) -> None:
    worker = Worker(outage, tmp_path / "agent.log")
    try:
        eventually(outage.store.hosts.list)
        mortal.down()
        eventually(lambda: "waiting for the broker" in worker.said())
        mortal.up()
        job, _ = outage.store.jobs.submit(train_spec("nothing"), "tester")
        assert outage.ended(AttemptRef(job.id, 1, HOST)).state == "succeeded"
    finally:
        assert worker.end() == 0, worker.said()
