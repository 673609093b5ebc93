"""Attempts as workers handle them: dispatch, claims, leases, faults, cancelling."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
import redis as redis_py
from store_builders import DONE, FAILED, LOG, World, parts

from service.jobs.files import DataLayout
from service.jobs.records import Artifact, AttemptRef, Job, JobError, PartOutcome, Progress, Superseded, TorchUsed
from service.jobs.spec.train import TrainSpec
from service.jobs.store import HostReport, Store, StoreLimits
from service.jobs.store.keyspace import LEASES, OUTBOX


def test_a_claim_brings_all_that_a_supervisor_needs(store: Store, gang: Job) -> None:
    first, second = parts(gang)
    claim = store.attempts.claim(second, "s")
    assert claim.ref == second
    assert claim.spec == TrainSpec.model_validate(gang.spec)
    assert [(share.host, share.devices) for share in claim.shares] == [("a", (0, 1, 2)), ("b", (0,))]
    assert claim.share.host == "b"
    assert claim.leader_address == "a.example"
    assert claim.lease_s == 3600
    assert first.host == "a"


def test_a_gang_runs_when_all_its_parts_are_claimed(store: Store, gang: Job) -> None:
    first, second = parts(gang)
    store.attempts.claim(first, "s")
    assert store.jobs.get(gang.id).state == "starting"
    store.attempts.claim(second, "t")
    running = store.jobs.get(gang.id)
    assert running.state == "running"
    assert running.started_at is not None


def test_a_second_supervisor_is_refused_and_the_first_may_ask_again(store: Store, gang: Job) -> None:
    ref = parts(gang)[0]
    claim = store.attempts.claim(ref, "first")
    assert store.attempts.claim(ref, "first") == claim
    with pytest.raises(Superseded):
        store.attempts.claim(ref, "second")


def test_a_part_is_dispatched_until_it_is_claimed(store: Store, redis: redis_py.Redis, gang: Job) -> None:
    refs = store.attempts.due()
    assert sorted(refs, key=str) == parts(gang)
    assert store.attempts.due() == []
    redis.zadd(OUTBOX(), {str(ref): 1 for ref in refs}, xx=True)
    store.attempts.claim(refs[0], "s")
    assert store.attempts.due() == [refs[1]]


def test_redispatch_waits_for_its_time(broker: str, redis: redis_py.Redis, data: DataLayout, gang: Job) -> None:
    store = Store.connect(broker, data, StoreLimits(redispatch_s=7))
    store.attempts.due()
    seconds, _ = redis.time()
    again = [score for _, score in redis.zrange(OUTBOX(), 0, -1, withscores=True)]
    assert all(5_000 < score - seconds * 1000 <= 8_000 for score in again)
    store.close()


def test_leases_have_the_lengths_of_the_limits(broker: str, data: DataLayout, world: World) -> None:
    store = Store.connect(broker, data, StoreLimits(lease_s=100, starting_lease_s=500))
    world.beat("a", cpu=1)
    job = world.submit()

    def lease_ms(ref: AttemptRef) -> float:
        seconds, micro = world.redis.time()
        return float(world.redis.zscore(LEASES(), str(ref)) or 0) - (seconds * 1000 + micro // 1000)

    store.attempts.place()
    ref = AttemptRef(job.id, 1, "a")
    assert 400_000 < lease_ms(ref) <= 500_000
    store.attempts.claim(ref, "s")
    assert 50_000 < lease_ms(ref) <= 100_000
    world.redis.zadd(LEASES(), {str(ref): 1})
    assert store.attempts.renew(ref) == "run"
    assert 50_000 < lease_ms(ref) <= 100_000
    store.close()


@pytest.mark.parametrize("stale", ["number", "host", "unclaimed", "unknown job"])
def test_every_write_of_anyone_else_is_refused(store: Store, gang: Job, stale: str) -> None:
    first, second = parts(gang)
    store.attempts.claim(first, "s")
    ref = {
        "number": AttemptRef(gang.id, 0, "a"),
        "host": AttemptRef(gang.id, 1, "c"),
        "unclaimed": second,
        "unknown job": AttemptRef("job_" + "0" * 20, 1, "a"),
    }[stale]
    artifact = Artifact(name="x", bytes=1, sha256="0", media_type="text/plain", created_at=datetime.now(UTC))
    before = store.events.latest_id(gang.id)
    for write in (
        lambda: store.attempts.emit(ref, [LOG]),
        lambda: store.attempts.record_artifact(ref, artifact),
        lambda: store.attempts.finish(ref, DONE),
    ):
        with pytest.raises(Superseded):
            write()
    assert store.attempts.renew(ref) == "lost"
    assert store.events.latest_id(gang.id) == before
    assert store.artifacts.list(gang.id) == []


def test_events_progress_and_result_reach_the_job(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    job = world.submit()
    (ref,) = world.start(job)
    progress: Any = {"type": "progress", "time": 1.0, "rank": 0, "done": 3, "total": 9, "unit": "steps"}
    store.attempts.emit(ref, [LOG, {**LOG, "line": "ünïcode \x00 \"'"}], progress)
    assert [stored.event["line"] for stored in store.events.page(job.id, types={"log"}).items] == [
        "hello",
        "ünïcode \x00 \"'",
    ]
    done = store.attempts.finish(ref, DONE)
    assert done.state == "succeeded"
    assert done.result == {"loss": 1.0}
    assert done.progress is not None
    assert done.progress == Progress(done=3, total=9, unit="steps")
    assert done.created_at <= (done.started_at or done.created_at) <= (done.ended_at or done.created_at)


def test_progress_within_a_unit_reaches_the_job(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    job = world.submit()
    (ref,) = world.start(job)
    told = {
        "done": 0,
        "total": 8,
        "unit": "instances",
        "share": 0.25,
        "phase": "bounding hidden layers",
        "left_s": 90.0,
    }
    store.attempts.emit(ref, [], {"type": "progress", "time": 1.0, "rank": 0, **told})  # type: ignore[typeddict-item]
    assert store.jobs.get(job.id).progress == Progress.model_validate(told)


def begun(name: str, at: float, rank: int = 0) -> Any:
    return {"type": "phase", "time": at, "rank": rank, "name": name}


def test_phases_last_until_the_next_one_and_the_last_one_to_the_end(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    job = world.submit()
    (ref,) = world.start(job)
    (starting,) = store.jobs.get(job.id).phases
    assert (starting.name, starting.seconds) == ("starting", None)
    at = starting.began_at.timestamp()
    store.attempts.emit(ref, [begun("importing", at + 0.25), begun("importing", at + 0.5, rank=1)], batch=1)
    store.attempts.emit(ref, [begun("importing", at + 0.25)], batch=1)  # no answer came: the same batch again
    store.attempts.emit(ref, [LOG, begun("loading", at + 1.0)], batch=2)
    told = [(phase.name, phase.seconds) for phase in store.jobs.get(job.id).phases]
    assert told == [("starting", pytest.approx(0.25)), ("importing", pytest.approx(0.75)), ("loading", None)]
    store.attempts.finish(ref, DONE)
    assert store.jobs.get(job.id).phases[-1].seconds == 0.0  # its clock was ahead


def test_phases_are_those_of_the_newest_attempt(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    job = world.submit(retries=1)
    (ref,) = world.start(job)
    store.attempts.emit(ref, [begun("importing", time.time())])
    store.attempts.finish(ref, FAILED)
    assert store.jobs.get(job.id).phases == ()
    world.start(store.jobs.get(job.id))
    assert [phase.name for phase in store.jobs.get(job.id).phases] == ["starting"]


def test_what_would_fail_again_is_not_tried_again(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    job = world.submit(retries=1)
    (ref,) = world.start(job)
    refused = JobError(type="GateError", message="no", final=True)
    assert store.attempts.finish(ref, PartOutcome("failed", error=refused)).state == "failed"


def test_a_job_keeps_the_torch_that_its_newest_attempt_runs_with(store: Store, world: World) -> None:
    job = world.submit()
    assert store.jobs.get(job.id).torch is None
    for version, tried in (("2.13.0+cpu", True), ("2.99.0", False)):
        store.hosts.beat(HostReport("a", "a.example", (), 4, {"torch": version}))
        (ref,) = world.start(job)
        store.hosts.beat(HostReport("a", "a.example", (), 4, {"torch": "2.11.0"}, (f"{job.id}:{ref.attempt}",)))
        assert store.jobs.get(job.id).torch == TorchUsed(version=version, tried=tried)
        store.attempts.finish(ref, PartOutcome("interrupted"))


def test_a_job_keeps_what_computed_each_attempt(store: Store, world: World) -> None:
    job = world.submit(device="cuda")
    for version, threads in (("2.13.0+cpu", 4), ("2.14.0", 8)):
        told = {"torch": version, "trivet": "1"}
        store.hosts.beat(HostReport("a", "a.example", ("H200", "B200"), 4, told, threads={"cuda": threads, "cpu": 1}))
        (ref,) = world.start(job)
        store.attempts.finish(ref, PartOutcome("interrupted"))
    both = store.jobs.get(job.id).computed_by
    assert [(by.attempt, by.host, by.pool, by.threads) for by in both] == [(1, "a", "cuda", 4), (2, "a", "cuda", 8)]
    assert {by.devices[0] for by in both} <= {"H200", "B200"}
    assert both[1].versions == {"torch": "2.14.0", "trivet": "1"}
    (listed,) = store.jobs.list()
    assert listed.computed_by == both


def test_a_rank_cannot_spoil_the_record_by_its_phases(store: Store, world: World) -> None:
    """Neither by times that are none, nor by their number or length."""
    world.beat("a", cpu=1)
    job = world.submit()
    (ref,) = world.start(job)
    for at in (1e300, -1e300, 1.0):
        store.attempts.emit(ref, [begun("x" * 10_000, at)] * 100)
    phases = store.jobs.get(job.id).phases
    assert len(phases) == 16
    assert max(len(phase.name) for phase in phases) == 60


@pytest.mark.parametrize("kind", ["state", "nonsense"])
def test_an_attempt_cannot_forge_the_services_events(store: Store, gang: Job, kind: str) -> None:
    store.attempts.claim(parts(gang)[0], "s")
    with pytest.raises(ValueError, match=kind):
        store.attempts.emit(parts(gang)[0], [LOG, {**LOG, "type": kind}])
    assert store.events.page(gang.id, types={"log"}).items == []


def test_one_failed_part_stops_its_peers_and_the_first_fault_decides(store: Store, gang: Job, world: World) -> None:
    first, second = parts(gang)
    store.attempts.claim(first, "s")
    store.attempts.claim(second, "s")
    assert store.attempts.finish(first, FAILED).state == "running"
    assert store.attempts.renew(second) == "stop"
    again = store.attempts.finish(second, PartOutcome("failed", error=JobError(type="Late", message="late")))
    assert again.state == "queued"
    assert again.reason is not None
    assert again.reason.startswith("attempt 1: no; retry 1 of 1")
    first, second = world.start(gang)
    store.attempts.finish(first, FAILED)
    ended = store.attempts.finish(second, PartOutcome("stopped"))
    assert (ended.state, ended.error) == ("failed", FAILED.error)


def test_a_fault_takes_back_what_nobody_claimed(store: Store, gang: Job) -> None:
    first, second = parts(gang)
    store.attempts.claim(first, "s")
    assert store.attempts.finish(first, FAILED).state == "queued"
    with pytest.raises(Superseded):
        store.attempts.claim(second, "late")
    assert {host.name: host.free["cpu"] for host in store.hosts.list()} == {"a": (0, 1, 2), "b": (0,)}


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_a_part_that_gives_no_reason_still_has_an_error(store: Store, world: World, status: Any) -> None:
    world.beat("a", cpu=1)
    (ref,) = world.start(world.submit())
    error = store.attempts.finish(ref, PartOutcome(status)).error
    assert error is not None
    assert error.type == status.capitalize()
    assert "host a" in error.message


def test_cancelling_a_running_job_waits_for_its_processes(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    job = world.submit(retries=5)
    (ref,) = world.start(job)
    assert store.attempts.renew(ref) == "run"
    assert store.jobs.cancel(job.id).state == "cancelling"
    assert store.attempts.renew(ref) == "stop"
    assert store.hosts.list()[0].free["cpu"] == ()
    assert store.attempts.finish(ref, FAILED).state == "cancelled"
    assert world.states(job) == ["queued", "starting", "running", "cancelling", "cancelled"]
    assert store.hosts.list()[0].free["cpu"] == (0,)
    assert store.jobs.get(job.id).error is None


def test_cancelling_before_any_claim_is_immediate(store: Store, gang: Job) -> None:
    assert store.jobs.cancel(gang.id).state == "cancelled"
    assert store.attempts.due() == []
    assert all(not host.running for host in store.hosts.list())
    for ref in parts(gang):
        with pytest.raises(Superseded):
            store.attempts.claim(ref, "late")


def test_success_counts_only_if_it_came_before_the_order_to_stop(store: Store, world: World) -> None:
    world.beat("a", cpu=2)
    in_time, too_late = world.submit(), world.submit()
    store.attempts.place()
    refs = [AttemptRef(job.id, 1, "a") for job in (in_time, too_late)]
    for ref in refs:
        store.attempts.claim(ref, "s")
        store.jobs.cancel(ref.job_id)
    store.attempts.renew(refs[1])
    ended = [store.attempts.finish(ref, DONE) for ref in refs]
    assert [(job.state, job.result) for job in ended] == [("succeeded", DONE.result), ("cancelled", None)]
