"""Attempts as workers handle them: dispatch, claims, leases, faults, cancelling, reaping."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import redis as redis_py
from store_builders import LIMITS

from service.jobs.layout import DataLayout
from service.jobs.records import Artifact, AttemptRef, Job, JobError, PartOutcome, Progress, Superseded
from service.jobs.spec.train import TrainSpec
from service.jobs.store import HostReport, Store, StoreLimits
from service.jobs.store.keyspace import LEASES, OUTBOX

Submit = Callable[..., Job]
Start = Callable[[Job], list[AttemptRef]]
Expire = Callable[[AttemptRef], None]
PassTime = Callable[[float], None]
FAILED = PartOutcome("failed", error=JobError(type="ValueError", message="no", rank=1))
DONE = PartOutcome("succeeded", {"loss": 1.0})
LOG: Any = {"type": "log", "time": 1.0, "rank": 0, "stream": "stdout", "line": "hello"}


def live(ref: AttemptRef) -> str:
    return f"{ref.job_id}:{ref.attempt}"


@pytest.fixture
def gang(store: Store, submit: Submit, beat: Any) -> Job:
    """A job that takes hosts a and b."""
    beat("a", cpu=3)
    beat("b", cpu=1)
    job = submit(4, max_hosts=2, retries=1)
    assert store.attempts.place() == [job.id]
    return store.jobs.get(job.id)


def parts(job: Job) -> list[AttemptRef]:
    return [AttemptRef(job.id, job.attempt, share.host) for share in job.placement]


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


def test_leases_have_the_lengths_of_the_limits(
    broker: str, redis: redis_py.Redis, data: DataLayout, submit: Submit, beat: Any
) -> None:
    store = Store.connect(broker, data, StoreLimits(lease_s=100, starting_lease_s=500))
    beat("a", cpu=1)
    job = submit()

    def lease_ms(ref: AttemptRef) -> float:
        seconds, micro = redis.time()
        return float(redis.zscore(LEASES(), str(ref)) or 0) - (seconds * 1000 + micro // 1000)

    store.attempts.place()
    ref = AttemptRef(job.id, 1, "a")
    assert 400_000 < lease_ms(ref) <= 500_000
    store.attempts.claim(ref, "s")
    assert 50_000 < lease_ms(ref) <= 100_000
    redis.zadd(LEASES(), {str(ref): 1})
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


def test_events_progress_and_result_reach_the_job(store: Store, submit: Submit, beat: Any, start: Start) -> None:
    beat("a", cpu=1)
    job = submit()
    (ref,) = start(job)
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


def test_a8_progress_within_a_unit_reaches_the_job(store: Store, submit: Submit, beat: Any, start: Start) -> None:
    beat("a", cpu=1)
    job = submit()
    (ref,) = start(job)
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


@pytest.mark.parametrize("kind", ["state", "nonsense"])
def test_an_attempt_cannot_forge_the_services_events(store: Store, gang: Job, kind: str) -> None:
    store.attempts.claim(parts(gang)[0], "s")
    with pytest.raises(ValueError, match=kind):
        store.attempts.emit(parts(gang)[0], [LOG, {**LOG, "type": kind}])
    assert store.events.page(gang.id, types={"log"}).items == []


def test_one_failed_part_stops_its_peers_and_the_first_fault_decides(store: Store, gang: Job, start: Start) -> None:
    first, second = parts(gang)
    store.attempts.claim(first, "s")
    store.attempts.claim(second, "s")
    assert store.attempts.finish(first, FAILED).state == "running"
    assert store.attempts.renew(second) == "stop"
    again = store.attempts.finish(second, PartOutcome("failed", error=JobError(type="Late", message="late")))
    assert again.state == "queued"
    assert again.reason is not None
    assert again.reason.startswith("attempt 1: no; retry 1 of 1")
    first, second = start(gang)
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
def test_a_part_that_gives_no_reason_still_has_an_error(
    store: Store, submit: Submit, beat: Any, start: Start, status: Any
) -> None:
    beat("a", cpu=1)
    (ref,) = start(submit())
    error = store.attempts.finish(ref, PartOutcome(status)).error
    assert error is not None
    assert error.type == status.capitalize()
    assert "host a" in error.message


def test_cancelling_a_running_job_waits_for_its_processes(
    store: Store, submit: Submit, beat: Any, start: Start, states: Any
) -> None:
    beat("a", cpu=1)
    job = submit(retries=5)
    (ref,) = start(job)
    assert store.attempts.renew(ref) == "run"
    assert store.jobs.cancel(job.id).state == "cancelling"
    assert store.attempts.renew(ref) == "stop"
    assert store.hosts.list()[0].free["cpu"] == ()
    assert store.attempts.finish(ref, FAILED).state == "cancelled"
    assert states(job) == ["queued", "starting", "running", "cancelling", "cancelled"]
    assert store.hosts.list()[0].free["cpu"] == (0,)
    assert store.jobs.get(job.id).error is None


def test_cancelling_before_any_claim_is_immediate(store: Store, gang: Job) -> None:
    assert store.jobs.cancel(gang.id).state == "cancelled"
    assert store.attempts.due() == []
    assert all(not host.running for host in store.hosts.list())
    for ref in parts(gang):
        with pytest.raises(Superseded):
            store.attempts.claim(ref, "late")


def test_success_counts_only_if_it_came_before_the_order_to_stop(
    store: Store, submit: Submit, beat: Any, start: Start
) -> None:
    beat("a", cpu=2)
    in_time, too_late = submit(), submit()
    store.attempts.place()
    refs = [AttemptRef(job.id, 1, "a") for job in (in_time, too_late)]
    for ref in refs:
        store.attempts.claim(ref, "s")
        store.jobs.cancel(ref.job_id)
    store.attempts.renew(refs[1])
    ended = [store.attempts.finish(ref, DONE) for ref in refs]
    assert [(job.state, job.result) for job in ended] == [("succeeded", DONE.result), ("cancelled", None)]


def test_a_lost_lease_holds_its_devices_until_the_host_confirms(
    store: Store, submit: Submit, beat: Any, start: Start, pass_time: PassTime
) -> None:
    beat("a", cpu=2)
    job = submit(2)
    (ref,) = start(job)
    pass_time(LIMITS.lease_s)
    beat("a", cpu=2, live=(live(ref),))
    assert store.attempts.reap() == [job.id]
    queued = store.jobs.get(job.id)
    assert queued.state == "queued"
    assert queued.reason is not None
    assert "stopped renewing" in queued.reason
    assert store.attempts.place() == []
    assert beat("a", cpu=2, live=(live(ref),)).kill == ()
    pass_time(LIMITS.lease_s / 3)
    assert beat("a", cpu=2, live=(live(ref),)).kill == (ref,)
    assert store.attempts.place() == []
    assert beat("a", cpu=2).kill == ()
    assert store.attempts.place() == [job.id]
    assert store.attempts.renew(ref) == "lost"


def test_losses_have_an_allowance_of_their_own_and_use_no_retry(
    store: Store, submit: Submit, beat: Any, start: Start, expire: Expire
) -> None:
    """The limits of these tests allow two."""
    beat("a", cpu=1)
    job = submit(retries=1)
    told = []
    for _ in range(3):
        (ref,) = start(job)
        store.attempts.emit(ref, [LOG])
        expire(ref)
        store.attempts.reap()
        beat("a", cpu=1)
        ended = store.jobs.get(job.id)
        told.append((ended.state, ended.reason or ""))
    assert [state for state, _ in told] == ["queued", "queued", "failed"]
    assert ["queued again without using a retry (1 of 2)" in said for _, said in told] == [True, False, False]
    assert ["queued again without using a retry (2 of 2)" in said for _, said in told] == [False, True, False]
    assert told[2][1].startswith("3 attempts were lost by no fault of the job's")
    assert ended.error is not None
    assert ended.error.type == "LeaseLost"


def test_a_failure_uses_a_retry_and_a_reported_loss_does_not(
    store: Store, submit: Submit, beat: Any, start: Start
) -> None:
    beat("a", cpu=1)
    job = submit(retries=1)
    lost = PartOutcome("lost", error=JobError(type="SupervisorFault", message="no room"))
    for outcome, said in ((lost, "(1 of 2)"), (FAILED, "retry 1 of 1"), (lost, "(2 of 2)")):
        (ref,) = start(job)
        store.attempts.emit(ref, [LOG])
        queued = store.attempts.finish(ref, outcome)
        assert queued.state == "queued"
        assert queued.reason is not None
        assert said in queued.reason
    (ref,) = start(job)
    assert store.attempts.finish(ref, FAILED).error == FAILED.error


@pytest.fixture(params=[False, True], ids=["queued", "placed again"])
def lost(request: pytest.FixtureRequest, store: Store, submit: Submit, start: Start, expire: Expire) -> AttemptRef:
    """A part that was given up for lost on a host of two slots; in one case it was placed again, and nobody began."""
    store.hosts.beat(HostReport("a", "a.example", cpu_slots=2))
    job = submit()
    (ref,) = start(job)
    expire(ref)
    store.attempts.reap()
    if request.param:
        assert store.attempts.place() == [job.id]
    return ref


@pytest.mark.parametrize("first", ["renew", "emit"])
def test_an_attempt_given_up_for_lost_goes_on_while_no_newer_one_is_claimed(
    store: Store, lost: AttemptRef, expire: Expire, first: str
) -> None:
    if first == "renew":
        assert store.attempts.renew(lost) == "run"
    else:
        store.attempts.emit(lost, [LOG])
    back = store.jobs.get(lost.job_id)
    assert (back.state, back.attempt, back.placement[0].devices) == ("running", 1, (0,))
    assert store.hosts.list()[0].free["cpu"] == (1,)
    expire(lost)
    store.attempts.reap()
    assert "(1 of 2)" in (store.jobs.get(lost.job_id).reason or "")


def test_finished_work_that_was_given_up_for_lost_is_taken(store: Store, lost: AttemptRef, states: Any) -> None:
    done = store.attempts.finish(lost, DONE)
    assert (done.state, done.attempt, done.result) == ("succeeded", 1, DONE.result)
    assert states(done)[-2:] == ["running", "succeeded"]
    assert store.hosts.list()[0].free["cpu"] == (0, 1)
    with pytest.raises(Superseded):
        store.attempts.claim(AttemptRef(lost.job_id, 2, "a"), "late")


def test_an_attempt_given_up_for_lost_is_refused_once_a_newer_one_is_claimed(
    store: Store, submit: Submit, beat: Any, start: Start, expire: Expire
) -> None:
    beat("a", cpu=2)
    job = submit()
    (ref,) = start(job)
    expire(ref)
    store.attempts.reap()
    (newer,) = start(job)
    with pytest.raises(Superseded):
        store.attempts.finish(ref, DONE)
    assert beat("a", cpu=2, live=(live(ref), live(newer))).kill == (ref,)
    assert store.attempts.finish(newer, DONE).attempt == 2


def test_a_number_of_a_withdrawn_attempt_is_not_given_again(
    store: Store, submit: Submit, beat: Any, start: Start, expire: Expire
) -> None:
    beat("a", cpu=2)
    job = submit(retries=1)
    (ref,) = start(job)
    expire(ref)
    store.attempts.reap()
    store.attempts.place()
    assert store.attempts.finish(ref, FAILED).state == "queued"
    assert store.attempts.place() == [job.id]
    assert store.jobs.get(job.id).attempt == 3


def test_all_lost_parts_of_a_gang_have_to_come_back(store: Store, gang: Job, expire: Expire) -> None:
    first, second = parts(gang)
    for ref in (first, second):
        store.attempts.claim(ref, "s")
        expire(ref)
    store.attempts.reap()
    assert store.jobs.get(gang.id).state == "queued"
    assert store.attempts.finish(first, DONE).state == "running"
    assert store.attempts.finish(second, PartOutcome("succeeded")).result == DONE.result
    assert store.jobs.get(gang.id).state == "succeeded"


def test_a_gang_does_not_come_back_without_a_part_that_is_gone(
    store: Store, gang: Job, expire: Expire, beat: Any
) -> None:
    first, second = parts(gang)
    for ref in (first, second):
        store.attempts.claim(ref, "s")
        expire(ref)
    store.attempts.reap()
    beat("b", cpu=1)
    with pytest.raises(Superseded):
        store.attempts.finish(first, DONE)


def test_a_renewal_before_the_reaper_comes_keeps_the_part(
    store: Store, submit: Submit, beat: Any, start: Start, expire: Expire
) -> None:
    beat("a", cpu=1)
    (ref,) = start(submit())
    expire(ref)
    assert store.attempts.renew(ref) == "run"
    assert store.attempts.reap() == []


def test_unclaimed_starts_cost_no_retry_up_to_a_bound(
    store: Store, submit: Submit, beat: Any, expire: Expire, pass_time: PassTime
) -> None:
    """The limits of these tests allow two. There is no other host, so it is tried again, after a while."""
    beat("a", cpu=1)
    job = submit(retries=1)
    seen = []
    for attempt in (1, 2, 3):
        assert store.attempts.place() == [job.id]
        expire(AttemptRef(job.id, attempt, "a"))
        assert store.attempts.reap() == [job.id]
        assert store.hosts.list()[0].free["cpu"] == (0,)
        seen.append(store.jobs.get(job.id).state)
        pass_time(60)
    assert seen == ["queued", "queued", "failed"]
    error = store.jobs.get(job.id).error
    assert error is not None
    assert error.type == "NotClaimed"


def test_a_requeued_job_keeps_its_place(store: Store, submit: Submit, beat: Any, expire: Expire) -> None:
    beat("a", cpu=1)
    old, young = submit(), submit()
    store.attempts.place()
    expire(AttemptRef(old.id, 1, "a"))
    store.attempts.reap()
    assert store.attempts.place() == [old.id]
    assert store.jobs.get(young.id).state == "queued"


def test_a_silent_host_loses_what_it_did_not_claim_at_once(
    store: Store, submit: Submit, beat: Any, silence: Callable[[str], None]
) -> None:
    beat("a", cpu=2)
    claimed, unclaimed = submit(), submit()
    store.attempts.place()
    ref = AttemptRef(claimed.id, 1, "a")
    store.attempts.claim(ref, "s")
    silence("a")
    assert store.attempts.reap() == [unclaimed.id]
    assert store.jobs.get(unclaimed.id).state == "queued"
    assert store.attempts.renew(ref) == "run"
    beat("b", cpu=1)
    assert store.attempts.place() == [unclaimed.id]


def test_a_lost_part_of_a_gang_ends_the_attempt_when_its_peers_have_ended(
    store: Store, gang: Job, expire: Expire, beat: Any
) -> None:
    first, second = parts(gang)
    store.attempts.claim(first, "s")
    store.attempts.claim(second, "s")
    expire(second)
    store.attempts.reap()
    assert store.jobs.get(gang.id).state == "running"
    assert store.attempts.renew(first) == "stop"
    assert store.attempts.finish(first, PartOutcome("stopped")).state == "queued"
    assert store.attempts.place() == []
    beat("b", cpu=1)
    assert store.attempts.place() == [gang.id]
