"""Fair share by the scripts: use is charged while devices are held, decays as in the model, and decides the order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis as redis_py
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import examples
from store_builders import DONE, LIMITS, submit_for, train

from service.jobs.files import DataLayout
from service.jobs.queue.fair_share import Use
from service.jobs.records import AttemptRef, Conflict, Rejected
from service.jobs.store import HostReport, Store, stubs
from service.jobs.store.keyspace import CLOCK, HOSTS, LEASES, PLACEMENT_IDLE, USES

HALF_LIFE_S = 3600.0
FAIR = replace(LIMITS, fair_share_half_life_s=HALF_LIFE_S)
BOUND_MS = round(LIMITS.max_queue_bypass_s * 1000)


@pytest.fixture
def fair(broker: str, redis: redis_py.Redis, data: DataLayout) -> Any:
    store = Store.connect(broker, data, FAIR)
    yield store
    store.close()


def host(store: Store, slots: int, name: str = "a") -> None:
    store.hosts.beat(HostReport(name, name, (), slots))


def test_projects_that_start_out_equal_take_turns(fair: Store) -> None:
    first = [submit_for(fair, "vision") for _ in range(3)]
    second = [submit_for(fair, "speech") for _ in range(3)]
    host(fair, 6)
    assert fair.attempts.place() == [job for pair in zip(first, second, strict=True) for job in pair]


def test_who_used_less_is_next_until_it_is_forgotten(fair: Store, redis: redis_py.Redis) -> None:
    host(fair, 1)
    vision = submit_for(fair, "vision")
    assert fair.attempts.place() == [vision]
    redis.hincrby(CLOCK(), "now", 600_000)
    older, younger = submit_for(fair, "vision"), submit_for(fair, "speech")
    fair.jobs.cancel(vision)
    assert fair.attempts.place() == [younger]
    assert [share.project for share in fair.shares.list()] == ["speech", "vision"]
    redis.hincrby(CLOCK(), "now", round(12 * HALF_LIFE_S * 1000))
    fair.jobs.cancel(younger)
    third, fourth = submit_for(fair, "speech"), submit_for(fair, "vision")
    assert fair.shares.uses()["vision"].used_s < 1
    host(fair, 1)
    assert fair.attempts.place() == [older]
    assert {third, fourth} == {line.job for line in fair.queue.page().items}


def test_a_project_that_goes_leaves_no_use_and_goes_only_when_it_holds_nothing(
    fair: Store, redis: redis_py.Redis
) -> None:
    fair.projects.create("speech")
    host(fair, 1)
    job = submit_for(fair, "speech", spec=train().model_dump_json(by_alias=True))
    fair.attempts.place()
    fair.attempts.claim(ref := AttemptRef(job, 1, "a"), "one")
    redis.hincrby(CLOCK(), "now", 600_000)
    fair.jobs.cancel(job)
    redis.zadd(LEASES(), {str(ref): 1})
    fair.attempts.reap()
    fair.jobs.delete(job)
    with pytest.raises(Conflict, match="holds 1 devices"):
        fair.projects.delete("speech")
    host(fair, 1)
    assert redis.hexists(USES(), "speech")
    fair.projects.delete("speech")
    assert not redis.hexists(USES(), "speech")


def test_a_weight_lets_a_project_use_more(fair: Store) -> None:
    assert fair.shares.weigh("speech", 2).weight == 2
    jobs = {name: [submit_for(fair, name) for _ in range(6)] for name in ("vision", "speech")}
    host(fair, 6)
    placed = fair.attempts.place()
    assert len(set(placed) & set(jobs["speech"])) == 4
    fair.shares.weigh("speech", 1)
    assert {share.weight for share in fair.shares.list()} == {1}


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), 1e9])
def test_a_weight_out_of_range_is_refused(fair: Store, weight: float) -> None:
    with pytest.raises(Rejected, match="out of range"):
        fair.shares.weigh("vision", weight)


def test_use_is_that_of_the_model(fair: Store, redis: redis_py.Redis) -> None:
    host(fair, 4)
    job = submit_for(fair, "vision", ranks=4)
    fair.attempts.place()
    held = fair.shares.uses()["vision"]
    assert held.held == 4
    redis.hincrby(CLOCK(), "now", 1_800_000)
    expected = held.after(1800, HALF_LIFE_S)
    fair.jobs.cancel(job)
    ended = fair.shares.uses()["vision"]
    assert (ended.held, ended.used_s) == (0, pytest.approx(expected.used_s, rel=1e-2))
    redis.hincrby(CLOCK(), "now", round(HALF_LIFE_S * 1000))
    assert fair.shares.uses()["vision"].used_s == pytest.approx(expected.used_s / 2, rel=1e-2)


def test_an_overdue_job_is_not_overtaken_by_a_project_that_used_less(fair: Store, redis: redis_py.Redis) -> None:
    redis.hset(USES(), "vision", f"1e9 0 {2**41}")
    redis.hset(CLOCK(), mapping={"now": 2**41, "wall": 2**41})
    old = submit_for(fair, "vision")
    redis.hincrby(CLOCK(), "now", BOUND_MS)
    young = submit_for(fair, "speech")
    host(fair, 1)
    assert [line.job for line in fair.queue.page().items] == [old, young]
    assert fair.attempts.place() == [old]


def test_a_longer_bound_lets_fair_share_go_on(broker: str, redis: redis_py.Redis, data: DataLayout) -> None:
    store = Store.connect(broker, data, replace(FAIR, fair_share_bound_s=1e6))
    host(store, 3)
    small = submit_for(store, "vision")
    assert store.attempts.place() == [small]
    old = submit_for(store, "vision", ranks=3)
    redis.hincrby(CLOCK(), "now", BOUND_MS)
    redis.delete(PLACEMENT_IDLE())
    own, other = submit_for(store, "vision"), submit_for(store, "speech")
    assert store.attempts.place() == [other]
    reasons = {line.job: line.reason for line in store.queue.page().items}
    assert reasons[own] == f"is held back by job {old}, which has waited too long to be overtaken"
    late = submit_for(store, "speech", ranks=3)
    assert store.attempts.place() == []
    assert store.jobs.get(late).reason == "waits for 3 free cpu devices on one host"
    store.close()


def test_every_way_to_free_devices_ends_the_charge(fair: Store, redis: redis_py.Redis) -> None:
    def held() -> int:
        return sum(use.held for use in fair.shares.uses().values())

    def begin() -> AttemptRef:
        host(fair, 2)
        (job,) = fair.attempts.place()
        ref = AttemptRef(job, fair.jobs.get(job).attempt, "a")
        stubs.claim(fair.client, FAIR.script_argument, job, ref.attempt, "a", "supervisor")
        assert held() == 2
        return ref

    submit_for(fair, "vision", 2)
    fair.attempts.finish(begin(), DONE)
    assert held() == 0
    submit_for(fair, "vision", 2)
    redis.zadd(LEASES(), {str(begin()): 1}, xx=True)
    fair.attempts.reap()
    assert held() == 2
    host(fair, 2)
    assert held() == 0
    redis.zadd(LEASES(), {str(begin()): 1}, xx=True)
    redis.zadd(HOSTS(), {"a": 1}, xx=True)
    fair.attempts.reap()
    assert fair.hosts.list() == []
    assert held() == 0


rows = st.lists(
    st.tuples(
        st.sampled_from(["default", "vision", "speech", "a/b"]),
        st.integers(-1, 1),
        st.integers(1, 6),
        st.sampled_from([0, 0, BOUND_MS]),
    ),
    min_size=1,
    max_size=14,
)
uses = st.dictionaries(
    st.sampled_from(["default", "vision", "speech"]), st.integers(0, 20).map(lambda used: 30.5 * used)
)


@settings(max_examples=examples(15, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=rows, used=uses, room=st.integers(1, 40))
def test_placement_follows_the_model(
    fair: Store, redis: redis_py.Redis, wanted: list[Any], used: dict[str, float], room: int
) -> None:
    """What is placed on one host is what the model takes next among what fits, until a barrier."""
    redis.flushall()
    moment = 2**41
    for project, seconds in used.items():
        redis.hset(USES(), project, f"{seconds * 1000:.17g} 0 {moment}")
    jobs = []
    for project, priority, ranks, waited in sorted(wanted, key=lambda row: -row[3]):
        redis.hset(CLOCK(), mapping={"now": moment - waited, "wall": 2**50})
        name = submit_for(fair, project, ranks, priority=str(priority))
        jobs.append((name, project, priority, ranks, waited))
    redis.hset(CLOCK(), mapping={"now": moment, "wall": 2**50})
    host(fair, room)
    placed = fair.attempts.place()
    assert sorted(placed) == sorted(_obvious(jobs, used, room))
    if sum(row[2] for row in wanted) <= room:
        assert len(placed) == len(jobs)


def _obvious(jobs: list[tuple[str, str, int, int, int]], used: dict[str, float], room: int) -> list[str]:
    uses = {project: Use(used.get(project, 0.0)) for _, project, *_ in jobs}
    left, placed, free = list(jobs), list[str](), room

    def turn(job: tuple[str, str, int, int, int]) -> tuple[Any, ...]:
        name, project, priority, _, waited = job
        return -priority, -1.0 if waited else uses[project].share, name

    while True:
        ordered = sorted(left, key=turn)
        barrier = next((job for job in ordered if job[4] and free < job[3] <= room), None)
        before = ordered if barrier is None else ordered[: ordered.index(barrier)]
        fitting = [job for job in before if job[3] <= free]
        if not fitting:
            return placed
        name, project, _, ranks, _ = fitting[0]
        left.remove(fitting[0])
        placed.append(name)
        free -= ranks
        uses[project] = uses[project].holding(ranks)
