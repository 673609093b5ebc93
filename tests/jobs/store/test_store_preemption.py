"""Preemption by the scripts: room is made for whom it is meant, nothing is lost, and nobody is stopped in vain."""

from __future__ import annotations

import orjson
import redis as redis_py
from store_builders import DONE, LIMITS, World

from service.jobs.records import AttemptRef, Job, PartOutcome
from service.jobs.store import Store, stubs
from service.jobs.store.keyspace import JOB, PREEMPTION_PAUSE

STOPPED = PartOutcome("stopped")
ENOUGH_S = LIMITS.preemption_min_run_s + 1


def make_room(world: World, after_s: float = 0) -> list[str]:
    """Ask for room after so many seconds; the ids of those that were asked."""
    world.pass_time(after_s)
    world.redis.delete(PREEMPTION_PAUSE())
    made = world.store.preemptions.make_room()
    return [] if made is None else [victim.id for victim in made.victims]


def test_a_job_of_lower_priority_makes_room_and_is_queued_again(store: Store, world: World) -> None:
    world.beat("a", cpu=2)
    low = world.submit(2, preemptible=True)
    (ref,) = world.start(low)
    urgent = world.submit(2, priority=5)
    world.redis.hset(JOB(low.id), "retries", 0)
    assert store.attempts.place() == []
    age_of_parts(world.redis, low.id, "a")
    made = store.preemptions.make_room()
    assert made is not None
    assert (made.beneficiary.id, [victim.id for victim in made.victims]) == (urgent.id, [low.id])
    assert store.jobs.get(low.id).reason == f"makes room for job {urgent.id}"
    assert store.attempts.renew(ref) == "stop"
    back = store.attempts.finish(ref, STOPPED)
    assert (back.state, back.error) == ("queued", None)
    assert (store.jobs.get(low.id).reason or "").startswith(f"attempt 1: preempted by job {urgent.id}; queued again")
    assert world.redis.hmget(JOB(low.id), "retries_used", "lost_attempts") == [b"0", b"0"]
    assert store.attempts.place() == [urgent.id]


def age_of_parts(redis: redis_py.Redis, job_id: str, host: str) -> None:
    """Let a job have run for as long as it takes to be asked."""
    key = f"trivet:host:{host}:parts"
    (name,) = [name for name in redis.hkeys(key) if name.decode().startswith(job_id)]
    part = orjson.loads(redis.hget(key, name))
    redis.hset(key, name, orjson.dumps({**part, "placed_at": part["placed_at"] - LIMITS.preemption_min_run_s * 1000}))


def test_nobody_is_asked_before_it_has_run_for_a_while(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    low = world.submit(preemptible=True)
    (ref,) = world.start(low)
    urgent = world.submit(priority=5)
    assert make_room(world) == []
    assert make_room(world, ENOUGH_S) == [low.id]
    assert make_room(world) == []
    store.attempts.finish(ref, STOPPED)
    (urgent_ref,) = world.start(urgent)
    store.attempts.finish(urgent_ref, DONE)
    world.start(low)
    world.submit(priority=5)
    assert make_room(world) == []


def test_only_preemptible_jobs_of_lower_priority_are_asked(store: Store, world: World) -> None:
    world.beat("a", cpu=2)
    world.start(world.submit(1))
    world.start(world.submit(1, preemptible=True, priority=5))
    world.submit(1, priority=5)
    assert make_room(world, ENOUGH_S) == []


def test_nobody_else_takes_the_room(store: Store, world: World) -> None:
    world.beat("a", cpu=2)
    jobs, refs = list[Job](), list[AttemptRef]()
    for _ in range(2):
        jobs.append(world.submit(1, preemptible=True))
        refs += world.start(jobs[-1])
    urgent = world.submit(2, priority=5)
    assert sorted(make_room(world, ENOUGH_S)) == sorted(job.id for job in jobs)
    store.attempts.finish(refs[0], STOPPED)
    assert store.attempts.place() == []
    reason = store.jobs.get(jobs[0].id).reason or ""
    assert reason.endswith(f"is held back by job {urgent.id}, which others make room for")
    store.attempts.finish(refs[1], STOPPED)
    assert store.attempts.place() == [urgent.id]


def test_one_that_is_done_by_then_has_succeeded(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    low = world.submit(preemptible=True)
    (ref,) = world.start(low)
    world.submit(priority=5)
    assert make_room(world, ENOUGH_S) == [low.id]
    assert store.attempts.finish(ref, DONE).state == "succeeded"


def test_a_plan_that_is_no_longer_true_does_nothing(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    low = world.submit(preemptible=True)
    (ref,) = world.start(low)
    urgent, equal = world.submit(priority=5), world.submit()

    def preempt(job_id: str, attempt: int) -> int:
        victims = orjson.dumps([{"id": low.id, "attempt": attempt}]).decode()
        return stubs.preempt(store.client, LIMITS.script_argument, job_id, "cpu", victims)

    assert preempt(urgent.id, 2) == 0
    assert preempt(equal.id, 1) == 0
    assert preempt(low.id, 1) == 0
    assert store.attempts.renew(ref) == "run"
    assert preempt(urgent.id, 1) == 1
    assert preempt(urgent.id, 1) == 0
