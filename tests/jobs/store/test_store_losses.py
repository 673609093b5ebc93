"""Attempts that are lost: leases that end, parts that come back, and what a loss costs a job."""

from __future__ import annotations

import pytest
from store_builders import DONE, FAILED, LIMITS, LOG, World, live, parts

from service.jobs.records import AttemptRef, Job, JobError, PartOutcome, Superseded
from service.jobs.store import HostReport, Store


def test_a_lost_lease_holds_its_devices_until_the_host_confirms(store: Store, world: World) -> None:
    world.beat("a", cpu=2)
    job = world.submit(2)
    (ref,) = world.start(job)
    world.pass_time(LIMITS.lease_s)
    world.beat("a", cpu=2, live=(live(ref),))
    assert store.attempts.reap() == [job.id]
    queued = store.jobs.get(job.id)
    assert queued.state == "queued"
    assert queued.reason is not None
    assert "stopped renewing" in queued.reason
    assert store.attempts.place() == []
    assert world.beat("a", cpu=2, live=(live(ref),)).kill == ()
    world.pass_time(LIMITS.lease_s / 3)
    assert world.beat("a", cpu=2, live=(live(ref),)).kill == (ref,)
    assert store.attempts.place() == []
    assert world.beat("a", cpu=2).kill == ()
    assert store.attempts.place() == [job.id]
    assert store.attempts.renew(ref) == "lost"


def test_losses_have_an_allowance_of_their_own_and_use_no_retry(store: Store, world: World) -> None:
    """The limits of these tests allow two."""
    world.beat("a", cpu=1)
    job = world.submit(retries=1)
    told = []
    for _ in range(3):
        (ref,) = world.start(job)
        store.attempts.emit(ref, [LOG])
        world.expire(ref)
        store.attempts.reap()
        world.beat("a", cpu=1)
        ended = store.jobs.get(job.id)
        told.append((ended.state, ended.reason or ""))
    assert [state for state, _ in told] == ["queued", "queued", "failed"]
    assert ["queued again without using a retry (1 of 2)" in said for _, said in told] == [True, False, False]
    assert ["queued again without using a retry (2 of 2)" in said for _, said in told] == [False, True, False]
    assert told[2][1].startswith("3 attempts were lost by no fault of the job;")
    assert ended.error is not None
    assert ended.error.type == "LeaseLost"


def test_a_failure_uses_a_retry_and_a_reported_loss_does_not(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    job = world.submit(retries=1)
    lost = PartOutcome("lost", error=JobError(type="SupervisorFault", message="no room"))
    for outcome, said in ((lost, "(1 of 2)"), (FAILED, "retry 1 of 1"), (lost, "(2 of 2)")):
        (ref,) = world.start(job)
        store.attempts.emit(ref, [LOG])
        queued = store.attempts.finish(ref, outcome)
        assert queued.state == "queued"
        assert queued.reason is not None
        assert said in queued.reason
    (ref,) = world.start(job)
    assert store.attempts.finish(ref, FAILED).error == FAILED.error


@pytest.fixture(params=[False, True], ids=["queued", "placed again"])
def lost(request: pytest.FixtureRequest, store: Store, world: World) -> AttemptRef:
    """A part that was given up for lost on a host of two slots; in one case it was placed again, and nobody began."""
    store.hosts.beat(HostReport("a", "a.example", cpu_slots=2))
    job = world.submit()
    (ref,) = world.start(job)
    world.expire(ref)
    store.attempts.reap()
    if request.param:
        assert store.attempts.place() == [job.id]
    return ref


@pytest.mark.parametrize("first", ["renew", "emit"])
def test_an_attempt_given_up_for_lost_goes_on_while_no_newer_one_is_claimed(
    store: Store, lost: AttemptRef, world: World, first: str
) -> None:
    if first == "renew":
        assert store.attempts.renew(lost) == "run"
    else:
        store.attempts.emit(lost, [LOG])
    back = store.jobs.get(lost.job_id)
    assert (back.state, back.attempt, back.placement[0].devices) == ("running", 1, (0,))
    assert store.hosts.list()[0].free["cpu"] == (1,)
    world.expire(lost)
    store.attempts.reap()
    assert "(1 of 2)" in (store.jobs.get(lost.job_id).reason or "")


def test_finished_work_that_was_given_up_for_lost_is_taken(store: Store, lost: AttemptRef, world: World) -> None:
    done = store.attempts.finish(lost, DONE)
    assert (done.state, done.attempt, done.result) == ("succeeded", 1, DONE.result)
    assert world.states(done)[-2:] == ["running", "succeeded"]
    assert store.hosts.list()[0].free["cpu"] == (0, 1)
    with pytest.raises(Superseded):
        store.attempts.claim(AttemptRef(lost.job_id, 2, "a"), "late")


def test_an_attempt_given_up_for_lost_is_refused_once_a_newer_one_is_claimed(store: Store, world: World) -> None:
    world.beat("a", cpu=2)
    job = world.submit()
    (ref,) = world.start(job)
    world.expire(ref)
    store.attempts.reap()
    (newer,) = world.start(job)
    with pytest.raises(Superseded):
        store.attempts.finish(ref, DONE)
    assert world.beat("a", cpu=2, live=(live(ref), live(newer))).kill == (ref,)
    assert store.attempts.finish(newer, DONE).attempt == 2


def test_a_number_of_a_withdrawn_attempt_is_not_given_again(store: Store, world: World) -> None:
    world.beat("a", cpu=2)
    job = world.submit(retries=1)
    (ref,) = world.start(job)
    world.expire(ref)
    store.attempts.reap()
    store.attempts.place()
    assert store.attempts.finish(ref, FAILED).state == "queued"
    assert store.attempts.place() == [job.id]
    assert store.jobs.get(job.id).attempt == 3


@pytest.fixture
def lost_parts(store: Store, gang: Job, world: World) -> list[AttemptRef]:
    """Both parts of a gang, which has begun; they were given up for lost."""
    refs = parts(gang)
    for ref in refs:
        store.attempts.claim(ref, "s")
        world.expire(ref)
    store.attempts.reap()
    return refs


def test_all_lost_parts_of_a_gang_have_to_come_back(store: Store, gang: Job, lost_parts: list[AttemptRef]) -> None:
    first, second = lost_parts
    assert store.jobs.get(gang.id).state == "queued"
    assert store.attempts.finish(first, DONE).state == "running"
    assert store.attempts.finish(second, PartOutcome("succeeded")).result == DONE.result
    assert store.jobs.get(gang.id).state == "succeeded"


def test_a_gang_does_not_come_back_without_a_part_that_is_gone(
    store: Store, lost_parts: list[AttemptRef], world: World
) -> None:
    world.beat("b", cpu=1)
    with pytest.raises(Superseded):
        store.attempts.finish(lost_parts[0], DONE)


def test_a_renewal_before_the_reaper_comes_keeps_the_part(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    (ref,) = world.start(world.submit())
    world.expire(ref)
    assert store.attempts.renew(ref) == "run"
    assert store.attempts.reap() == []


def test_unclaimed_starts_cost_no_retry_up_to_a_bound(store: Store, world: World) -> None:
    """The limits of these tests allow two. There is no other host, so it is tried again, after a while."""
    world.beat("a", cpu=1)
    job = world.submit(retries=1)
    seen = []
    for attempt in (1, 2, 3):
        assert store.attempts.place() == [job.id]
        world.expire(AttemptRef(job.id, attempt, "a"))
        assert store.attempts.reap() == [job.id]
        assert store.hosts.list()[0].free["cpu"] == (0,)
        seen.append(store.jobs.get(job.id).state)
        world.pass_time(60)
    assert seen == ["queued", "queued", "failed"]
    error = store.jobs.get(job.id).error
    assert error is not None
    assert error.type == "NotClaimed"


def test_a_requeued_job_keeps_its_place(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    old, young = world.submit(), world.submit()
    store.attempts.place()
    world.expire(AttemptRef(old.id, 1, "a"))
    store.attempts.reap()
    assert store.attempts.place() == [old.id]
    assert store.jobs.get(young.id).state == "queued"


def test_a_silent_host_loses_what_it_did_not_claim_at_once(store: Store, world: World) -> None:
    world.beat("a", cpu=2)
    claimed, unclaimed = world.submit(), world.submit()
    store.attempts.place()
    ref = AttemptRef(claimed.id, 1, "a")
    store.attempts.claim(ref, "s")
    world.silence("a")
    assert store.attempts.reap() == [unclaimed.id]
    assert store.jobs.get(unclaimed.id).state == "queued"
    assert store.attempts.renew(ref) == "run"
    world.beat("b", cpu=1)
    assert store.attempts.place() == [unclaimed.id]


def lose_the_second(store: Store, gang: Job, world: World) -> str:
    """The second part is lost and the first one stops; the state of the job between the two."""
    first, second = parts(gang)
    world.expire(second)
    store.attempts.reap()
    state = store.jobs.get(gang.id).state
    assert store.attempts.renew(first) == "stop"
    assert store.attempts.finish(first, PartOutcome("stopped")).state == "queued"
    return state


def test_a_lost_part_of_a_gang_ends_the_attempt_when_its_peers_have_ended(
    store: Store, gang: Job, world: World
) -> None:
    for part in parts(gang):
        store.attempts.claim(part, "s")
    assert lose_the_second(store, gang, world) == "running"
    assert store.attempts.place() == []
    world.beat("b", cpu=1)
    assert store.attempts.place() == [gang.id]


def test_a_gang_of_which_one_host_does_not_claim_its_part_in_time_starts_nowhere(
    store: Store, gang: Job, world: World
) -> None:
    store.attempts.claim(parts(gang)[0], "s")
    lose_the_second(store, gang, world)
    reason = store.jobs.get(gang.id).reason or ""
    assert "nobody on host b claimed the job in time; queued again without using a retry" in reason
