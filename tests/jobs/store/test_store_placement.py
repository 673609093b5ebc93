"""Placement: order, best fit, gangs, backfill, and the bound on being overtaken."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import replace
from typing import Any

import orjson
import placement_reference as reference
import pytest
import redis as redis_py
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import examples, slow_but_for
from placement_reference import Room, Waiting
from store_builders import LIMITS, World, train

from service.jobs.files import DataLayout
from service.jobs.records import Job
from service.jobs.store import HostReport, Store, stubs
from service.jobs.store.keyspace import HOST, JOB, PLACEMENT_IDLE
from service.jobs.store.scripts import assemble

_AGE = assemble(
    """-- USES: core jobs queue
    dequeue(job_id)
    redis.call("HINCRBY", KEY.job(job_id), "queued_at", -by_ms)
    enqueue(job_id)
    """,
    [("job_id", "str"), ("by_ms", "int")],
)
BOUND_MS = round(LIMITS.max_queue_bypass_s * 1000)


def age(redis: redis_py.Redis, job: Job, by_ms: int) -> None:
    """Let a pending job have waited for that much longer."""
    redis.eval(_AGE, 0, job.id, by_ms)


def shares(store: Store, job: Job) -> dict[str, tuple[int, ...]]:
    return {share.host: share.devices for share in store.jobs.get(job.id).placement}


def test_higher_priority_first_then_age(store: Store, world: World) -> None:
    old, urgent, young = world.submit(), world.submit(priority=5), world.submit()
    world.beat("a", cpu=2)
    assert store.attempts.place() == [urgent.id, old.id]
    assert store.jobs.get(young.id).state == "queued"


def test_best_fit_leaves_the_large_host_whole(store: Store, world: World) -> None:
    world.beat("large", cpu=8)
    world.beat("small", cpu=3)
    job = world.submit(2)
    store.attempts.place()
    assert shares(store, job) == {"small": (0, 1)}


def test_a_gang_takes_the_fewest_hosts_all_or_nothing(store: Store, world: World) -> None:
    for name, slots in (("a", 2), ("b", 4), ("c", 3)):
        world.beat(name, cpu=slots)
    two, too_many = world.submit(6, max_hosts=3), world.submit(6, max_hosts=3)
    assert store.attempts.place() == [two.id]
    assert shares(store, two) == {"b": (0, 1, 2, 3), "a": (0, 1)}
    waiting = store.jobs.get(too_many.id)
    assert (waiting.state, waiting.placement) == ("queued", ())
    assert waiting.reason is not None
    assert "6 free cpu devices on at most 3 hosts" in waiting.reason


def test_a_job_does_not_spread_unless_it_allows_that(store: Store, world: World) -> None:
    world.beat("a", cpu=2)
    world.beat("b", cpu=2)
    alone = world.submit(4)
    assert store.attempts.place() == []
    reason = store.jobs.get(alone.id).reason
    assert reason is not None
    assert reason.endswith("4 free cpu devices on one host, even when idle; max_hosts of 2 would do")
    store.hosts.drain("b")
    store.attempts.place()
    reason = store.jobs.get(alone.id).reason
    assert reason is not None
    assert reason.endswith("even when idle (host b is draining)")


def test_backfill_until_the_bound_then_a_reservation(store: Store, redis: redis_py.Redis, world: World) -> None:
    world.beat("a", cpu=4)
    running, large, small = world.submit(2), world.submit(4), world.submit(2)
    assert store.attempts.place() == [running.id, small.id]
    late = world.submit(1)
    store.jobs.cancel(small.id)
    age(redis, large, BOUND_MS)
    assert store.attempts.place() == []
    reason = store.jobs.get(late.id).reason
    assert reason is not None
    assert large.id in reason
    store.jobs.cancel(running.id)
    assert store.attempts.place() == [large.id]


def test_a_reservation_binds_its_own_pool_and_what_is_behind_it_only(store: Store, world: World) -> None:
    world.beat("a", cpu=4, cuda=1)
    holder = world.submit(1, device="cpu", priority=9)
    large, ahead, other_pool = (
        world.submit(4, device="cpu"),
        world.submit(1, device="cpu", priority=1),
        world.submit(1, device="cuda"),
    )
    behind = world.submit(1, device="cpu")
    age(world.redis, large, BOUND_MS)
    assert store.attempts.place() == [holder.id, ahead.id, other_pool.id]
    assert store.jobs.get(behind.id).state == "queued"


def test_what_no_host_could_ever_hold_reserves_nothing(store: Store, redis: redis_py.Redis, world: World) -> None:
    impossible = [world.submit(8) for _ in range(300)]
    for job in impossible:
        age(redis, job, BOUND_MS)
    last = world.submit(1)
    world.beat("a", cpu=4)
    assert store.attempts.place() == [last.id]


def test_an_overdue_job_behind_a_younger_one_of_higher_priority_still_reserves(store: Store, world: World) -> None:
    world.beat("a", cpu=4)
    world.submit(1, priority=9)
    store.attempts.place()
    world.submit(4, priority=1)
    overdue = world.submit(4, priority=0)
    behind = world.submit(1, priority=-1)
    age(world.redis, overdue, BOUND_MS)
    between = world.submit(1, priority=1)
    assert store.attempts.place() == [between.id]
    assert store.jobs.get(behind.id).state == "queued"


def test_draining_and_silent_hosts_get_nothing(store: Store, world: World) -> None:
    for name in ("drained", "silent"):
        world.beat(name, cpu=4)
    store.hosts.drain("drained")
    world.silence("silent")
    job = world.submit()
    assert store.attempts.place() == []
    store.hosts.resume("drained")
    assert store.attempts.place() == [job.id]


def test_auto_is_cuda_where_the_fleet_has_any(store: Store, world: World) -> None:
    world.beat("a", cpu=4)
    first = world.submit()
    store.attempts.place()
    world.beat("b", cpu=4, cuda=1)
    second = world.submit()
    store.attempts.place()
    assert [store.jobs.get(job.id).placement[0].pool for job in (first, second)] == ["cpu", "cuda"]


def test_auto_does_not_wait_for_a_drained_host(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    world.beat("b", cpu=1, cuda=1)
    store.hosts.drain("b")
    first, second, third = world.submit(), world.submit(), world.submit(device="cuda")
    assert store.attempts.place() == [first.id]
    assert store.jobs.get(first.id).placement[0].pool == "cpu"
    assert store.jobs.get(second.id).reason == "waits for 1 free cpu device (host b is draining)"
    assert (
        store.jobs.get(third.id).reason
        == "no hosts that take work have 1 free cuda device, even when idle (host b is draining)"
    )
    store.hosts.resume("b")
    assert store.attempts.place() == [second.id]
    assert store.jobs.get(second.id).placement[0].pool == "cuda"
    assert store.jobs.get(third.id).reason == "waits for 1 free cuda device"


def test_auto_waits_for_a_failing_host(store: Store, redis: redis_py.Redis, world: World) -> None:
    world.beat("a", cpu=1)
    world.beat("b", cuda=1)
    redis.hset(HOST("b"), "retry_at", 2**50)
    world.submit()
    assert store.attempts.place() == []
    redis.hset(HOST("b"), "retry_at", 1)
    redis.delete(PLACEMENT_IDLE())
    assert len(store.attempts.place()) == 1


def test_a_job_says_which_one_holds_it_back(store: Store, redis: redis_py.Redis, world: World) -> None:
    world.beat("a", cpu=4, cuda=1)
    world.submit(1, device="cpu", priority=9)
    overdue, behind = world.submit(4, device="cpu"), world.submit(1, device="cpu")
    age(redis, overdue, BOUND_MS)
    store.attempts.place()
    held_back = f"is held back by job {overdue.id}, which has waited too long to be overtaken"
    assert store.jobs.get(behind.id).reason == held_back
    assert {job.id: job.reason for job in store.jobs.list().items}[behind.id] == held_back
    assert store.jobs.get(overdue.id).reason == "waits for 4 free cpu devices on one host"
    store.jobs.cancel(overdue.id)
    assert store.jobs.get(behind.id).reason == "waits for 1 free cpu device"


def calls_of_one_placement(store: Store, redis: redis_py.Redis) -> int:
    """Commands that the broker ran for it: a measure of its work that no busy machine disturbs."""
    redis.config_resetstat()
    store.attempts.place()
    return sum(int(stat["calls"]) for stat in redis.info("commandstats").values())


@pytest.mark.slow
@pytest.mark.parametrize("overdue", slow_but_for([False, True], True))
def test_the_work_of_one_placement_is_bounded_whatever_is_pending(
    broker: str, data: DataLayout, world: World, overdue: bool
) -> None:
    """Ten times the jobs and shapes, none of which fits, and 32 times the freed devices: no more commands."""
    store = Store.connect(broker, data, replace(LIMITS, max_queue_bypass_s=0.001 if overdue else 600))
    most, shape = [], itertools.count()
    for host in "abcd":
        world.beat(host, cpu=8)
    for jobs in (200, 2000):
        for index in itertools.islice(shape, jobs):
            submit_raw(store, ranks=33 + index // 4, hosts=index % 4 + 1, priority=index % 3)
        most.append(calls_of_one_placement(store, world.redis))
    assert max(most) < 2000
    assert most[1] < 2 * most[0]
    small = [submit_raw(store, ranks=1, hosts=1, priority=-1) for _ in range(40)]
    placed = [store.attempts.place() for _ in range(4)]
    assert placed[0]
    assert list(itertools.chain.from_iterable(placed)) == small[:32]
    store.close()


def submit_raw(store: Store, *, ranks: int, hosts: int, priority: int) -> str:
    """Through the script alone: the checks of a spec take longer than all that is tested here."""
    record = {"priority": str(priority), "shape": f"cpu:{ranks}:{hosts}", "after": "[]"}
    suffix = secrets.token_hex(6)[:11]
    entry = {"idem": "", "body_hash": "", "suffix": suffix, "record": record, "indexes": [], "after": [], "files": []}
    entries = orjson.dumps([entry]).decode()
    return stubs.submit(store.client, limits=LIMITS.script_argument, entries=entries)[0][1]


def test_a_full_fleet_costs_almost_nothing_until_something_changes(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    running, waiting = world.submit(), world.submit()
    assert store.attempts.place() == [running.id]
    assert calls_of_one_placement(store, world.redis) < 10
    store.jobs.cancel(running.id)
    assert store.attempts.place() == [waiting.id]


def test_more_jobs_than_one_call_places_follow_in_order(store: Store, world: World) -> None:
    world.beat("a", cpu=50)
    jobs = [world.submit(priority=index % 2) for index in range(50)]
    in_order = [job.id for job in jobs[1::2] + jobs[::2]]
    assert store.attempts.place() + store.attempts.place() == in_order


jobs = st.lists(
    st.tuples(
        st.sampled_from(["auto", "cpu", "cuda"]),
        st.one_of(st.integers(1, 6), st.integers(1, 70)),
        st.integers(1, 6),
        st.integers(-1, 1),
        st.sampled_from([0, 0, BOUND_MS]),
    ),
    max_size=16,
)
fleets = st.lists(st.tuples(st.integers(0, 3), st.one_of(st.integers(0, 4), st.integers(0, 30))), max_size=5)


@settings(max_examples=examples(25, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=jobs, fleet=fleets, data=st.data())
def test_placement_equals_the_obvious_one(
    store: Store, redis: redis_py.Redis, wanted: list[Any], fleet: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Twice: on an idle fleet, and on the fragments that are free after some of the placed jobs were cancelled."""
    redis.flushall()
    waiting = [submit_aged(store, redis, each) for each in wanted]
    rooms = []
    for index, (cuda, cpu) in enumerate(fleet):
        store.hosts.beat(HostReport(f"h{index}", "x", ("GPU",) * cuda, cpu))
        rooms.append(Room(f"h{index}", {"cuda": cuda, "cpu": cpu}, {"cuda": cuda, "cpu": cpu}))
    placed = check_against_reference(store, waiting, rooms)
    for job_id, (pool, by_host) in placed.items():
        if data.draw(st.booleans()):
            store.jobs.cancel(job_id)
            for host in rooms:
                host.free[pool] += by_host.get(host.name, 0)
    check_against_reference(store, [job for job in waiting if job.id not in placed], rooms)


def submit_aged(store: Store, redis: redis_py.Redis, wanted: tuple[str, int, int, int, int]) -> Waiting:
    device, ranks, max_hosts, priority, waited = wanted
    job, _ = store.jobs.submit(train(ranks, device=device, max_hosts=max_hosts, priority=priority), "ada")
    age(redis, job, waited)
    queued_at = int(redis.hget(JOB(job.id), "queued_at"))
    return Waiting(job.id, device, ranks, max_hosts, priority, waited, queued_at)


def check_against_reference(
    store: Store, waiting: list[Waiting], rooms: list[Room]
) -> dict[str, tuple[str, dict[str, int]]]:
    expected = reference.place(waiting, rooms, BOUND_MS)
    assert set(store.attempts.place()) == set(expected)
    for job_id, (pool, by_host) in expected.items():
        placement = store.jobs.get(job_id).placement
        assert {share.host: len(share.devices) for share in placement} == by_host
        assert {share.pool for share in placement} == {pool}
    return expected


@given(room=st.lists(st.integers(0, 5), min_size=1, max_size=5), ranks=st.integers(1, 12))
def test_the_reference_itself_uses_the_fewest_hosts(room: list[int], ranks: int) -> None:
    by_host = reference.choose({f"h{index}": free for index, free in enumerate(room)}, ranks, len(room))
    fewest = reference.fewest_hosts(room, ranks)
    assert (None if by_host is None else len(by_host)) == fewest
    if by_host is not None:
        assert sum(by_host.values()) == ranks
