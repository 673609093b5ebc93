"""Hosts that cannot start work: avoided by the job that they failed, marked after a second failure, tried again."""

from __future__ import annotations

from typing import Any

import pytest
from store_builders import World

from service.jobs.records import AttemptRef, FailingHost, Job, JobError, PartOutcome
from service.jobs.store import Store

LOG: Any = {"type": "log", "time": 1.0, "rank": 0, "stream": "stdout", "line": "hello"}


def where(world: World, job: Job) -> list[str]:
    """The hosts on which a job was placed."""
    return [share.host for share in world.store.jobs.get(job.id).placement]


def fail(world: World, *jobs: Job, host: str = "sick") -> None:
    """Nobody claims the parts of these jobs on the sick host in time."""
    for job in jobs:
        world.expire(AttemptRef(job.id, world.store.jobs.get(job.id).attempt, host))
    assert sorted(world.store.attempts.reap()) == sorted(job.id for job in jobs)


def failing(world: World) -> FailingHost | None:
    return next(host for host in world.store.hosts.list() if host.name == "sick").failing


@pytest.fixture
def marked(store: Store, world: World) -> list[Job]:
    """Two jobs that the only host, of four slots, did not start."""
    world.beat("sick", cpu=4)
    jobs = [world.submit(), world.submit()]
    store.attempts.place()
    fail(world, *jobs)
    return jobs


def test_a_job_goes_to_the_good_host_after_the_sick_one_did_not_start_it(store: Store, world: World) -> None:
    """The sick host fits better, so without a memory it would be chosen every time."""
    world.beat("sick", cpu=1)
    world.beat("good", cpu=8)
    job = world.submit()
    store.attempts.place()
    assert where(world, job) == ["sick"]
    fail(world, job)
    assert store.attempts.place() == [job.id]
    assert where(world, job) == ["good"]


def test_a_job_waits_for_a_good_host_that_is_busy(store: Store, world: World) -> None:
    world.beat("good", cpu=1)
    busy = world.submit()
    assert store.attempts.place() == [busy.id]
    world.beat("sick", cpu=1)
    job, other = world.submit(), world.submit(priority=-1)
    store.attempts.place()
    fail(world, job)
    assert store.attempts.place() == [other.id], "one failure does not mark the host"
    reason = store.jobs.get(job.id).reason
    assert reason is not None
    assert reason.endswith("waits for 1 free cpu device, other than host sick, where it did not start")
    store.jobs.cancel(busy.id)
    assert store.attempts.place() == [job.id]
    assert where(world, job) == ["good"]


def test_a_gang_that_needs_the_host_gets_it_again(store: Store, world: World) -> None:
    """It could not run anywhere else, ever."""
    world.beat("sick", cpu=2)
    world.beat("good", cpu=2)
    gang = world.submit(4, max_hosts=2)
    store.attempts.place()
    fail(world, gang)
    assert store.attempts.place() == [gang.id]
    assert sorted(where(world, gang)) == ["good", "sick"]


def test_a_gang_avoids_the_host_where_others_suffice(store: Store, world: World) -> None:
    for name in ("good", "sick", "well"):
        world.beat(name, cpu=2)
    gang = world.submit(4, max_hosts=2)
    store.attempts.place()
    assert "sick" in where(world, gang)
    fail(world, gang)
    assert store.attempts.place() == [gang.id]
    assert sorted(where(world, gang)) == ["good", "well"]


def test_a_host_is_marked_with_the_reason_after_a_second_failure(store: Store, world: World) -> None:
    world.beat("sick", cpu=1)
    job = world.submit()
    store.attempts.place()
    fail(world, job)
    assert failing(world) is None
    store.attempts.place()
    fail(world, job)
    mark = failing(world)
    assert mark.failed_starts == 2
    assert mark.reason == "nobody on host sick claimed the job in time"
    assert 59 < mark.retry_in_s <= 60
    assert store.attempts.place() == []
    reason = store.jobs.get(job.id).reason
    assert reason is not None
    assert "no hosts that take work" in reason


def test_a_marked_host_is_tried_with_one_part_after_growing_pauses(
    store: Store, world: World, marked: list[Job]
) -> None:
    first = marked[0]
    assert store.attempts.place() == []
    world.pass_time(61)
    assert failing(world).retry_in_s == 0
    assert store.attempts.place() == [first.id]
    assert store.attempts.place() == []
    fail(world, first)
    assert 119 < failing(world).retry_in_s <= 120
    world.pass_time(61)
    assert store.attempts.place() == []
    world.pass_time(60)
    assert len(store.attempts.place()) == 1


def test_parts_that_were_placed_together_count_as_one_failure_of_a_marked_host(store: Store, world: World) -> None:
    world.beat("sick", cpu=8)
    jobs = [world.submit() for _ in range(8)]
    store.attempts.place()
    fail(world, *jobs)
    assert failing(world).failed_starts == 8
    assert 59 < failing(world).retry_in_s <= 60


def test_ranks_that_run_clear_the_mark(store: Store, world: World, marked: list[Job]) -> None:
    world.pass_time(61)
    (tried,) = store.attempts.place()
    ref = AttemptRef(tried, 2, "sick")
    store.attempts.claim(ref, "s")
    assert failing(world) is not None
    store.attempts.emit(ref, [LOG])
    assert failing(world) is None
    assert len(store.attempts.place()) == 1


def test_an_operators_resume_clears_the_mark(store: Store, world: World, marked: list[Job]) -> None:
    assert store.hosts.resume("sick").failing is None
    assert sorted(store.attempts.place()) == sorted(job.id for job in marked)


@pytest.mark.parametrize("began", [False, True])
def test_a_supervisor_that_is_lost_before_anything_ran_counts_as_a_failed_start(
    store: Store, world: World, began: bool
) -> None:
    """A host that claims everything and starts nothing, say with a full disk."""
    world.beat("sick", cpu=1)
    world.submit()
    for attempt in (1, 2):
        (job_id,) = store.attempts.place()
        ref = AttemptRef(job_id, attempt, "sick")
        store.attempts.claim(ref, "s")
        if began:
            store.attempts.emit(ref, [LOG])
        store.attempts.finish(ref, PartOutcome("lost", error=JobError(type="SupervisorFault", message="disk full")))
    assert (failing(world) is None) == began
    assert began or failing(world).reason == "disk full"


def test_a_job_that_fails_by_itself_says_nothing_against_its_host(store: Store, world: World) -> None:
    world.beat("sick", cpu=1)
    world.submit(retries=3)
    for attempt in (1, 2, 3):
        (job_id,) = store.attempts.place()
        ref = AttemptRef(job_id, attempt, "sick")
        store.attempts.claim(ref, "s")
        store.attempts.finish(ref, PartOutcome("failed", error=JobError(type="ValueError", message="no")))
    assert failing(world) is None


def test_the_mark_goes_with_the_host_and_a_drain_stays(store: Store, world: World, marked: list[Job]) -> None:
    store.hosts.leave("sick")
    world.beat("sick", cpu=4)
    assert store.hosts.list()[0].failing is None
    store.hosts.drain("sick")
    store.hosts.leave("sick")
    assert not store.hosts.list()[0].alive
    assert world.beat("sick", cpu=4).drain
    assert store.attempts.place() == []
