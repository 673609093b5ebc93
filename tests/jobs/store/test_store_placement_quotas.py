"""Quotas that placement keeps: devices at once and device-hours, by the scripts beside a plain model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis as redis_py
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import examples
from store_builders import DONE, LIMITS, submit_for

from service.jobs.accounts import Project, Quotas
from service.jobs.files import DataLayout
from service.jobs.queue.fair_share import Use
from service.jobs.records import AttemptRef, Conflict
from service.jobs.store import HostReport, Store, projects, stubs
from service.jobs.store.keyspace import CLOCK, DEVICE_HOURS, PLACEMENT_IDLE, PLACEMENT_QUOTAS

BOUND_MS = round(LIMITS.max_queue_bypass_s * 1000)
HOUR_MS = 3_600_000
START = 400_000 * HOUR_MS
"""The first moment of an hour."""


@pytest.fixture
def limited(broker: str, redis: redis_py.Redis, data: DataLayout) -> Any:
    store = Store.connect(broker, data, replace(LIMITS, quota_window_h=3))
    for name in ("vision", "speech"):
        store.projects.create(name)
    yield store
    store.close()


def host(store: Store, slots: int) -> None:
    store.hosts.beat(HostReport("a", "a", (), slots))


def claim(store: Store, job_id: str) -> AttemptRef:
    stubs.claim(store.client, store.jobs.limits.script_argument, job_id, 1, "a", "supervisor")
    return AttemptRef(job_id, 1, "a")


def at(redis: redis_py.Redis, moment: int) -> None:
    redis.hset(CLOCK(), mapping={"now": moment, "wall": 2**50})
    redis.delete(PLACEMENT_IDLE())


def reason(store: Store, job_id: str) -> str | None:
    (line,) = store.queue.page(job_id=job_id).items
    assert line.reason == store.jobs.get(job_id).reason
    return line.reason


def place_within(limited: Store, redis: redis_py.Redis, quotas: dict[str, int], devices: int) -> str:
    """A job of the project, placed first."""
    limited.projects.change("vision", quotas)
    at(redis, START)
    host(limited, 8)
    job = submit_for(limited, "vision", devices)
    assert limited.attempts.place() == [job]
    return job


def use_one_of_two(limited: Store, redis: redis_py.Redis) -> str:
    """The project may hold two devices, and a job of it has one."""
    return place_within(limited, redis, {"devices": 2}, 1)


def test_a_job_over_its_projects_devices_waits_and_holds_back_nobody(limited: Store, redis: redis_py.Redis) -> None:
    first, large = use_one_of_two(limited, redis), submit_for(limited, "vision", 2)
    assert limited.projects.usage("vision").devices == 1
    assert reason(limited, large) == "project vision uses 1 of 2 devices, and this job needs 2"
    at(redis, START + 2 * BOUND_MS)
    small, other = submit_for(limited, "vision", 1), submit_for(limited, "speech", 6)
    assert limited.attempts.place() == [other]
    assert (
        reason(limited, small)
        == f"is held back by job {large} of its project, which has waited too long to be overtaken"
    )
    limited.jobs.cancel(first)
    host(limited, 8)
    assert limited.attempts.place() == [large]
    assert reason(limited, small) == "project vision uses 2 of 2 devices, and this job needs 1"
    limited.projects.change("vision", {"devices": None})
    limited.jobs.cancel(other)
    assert limited.attempts.place() == [small]


def test_before_the_bound_a_smaller_job_of_the_project_may_overtake(limited: Store, redis: redis_py.Redis) -> None:
    use_one_of_two(limited, redis)
    submit_for(limited, "vision", 2)
    small = submit_for(limited, "vision", 1)
    assert limited.attempts.place() == [small]


def test_device_hours_are_those_of_the_window(limited: Store, redis: redis_py.Redis) -> None:
    """Two devices are held for an hour and a half, and the window of three hours forgets the first of these."""
    job = place_within(limited, redis, {"device_hours": 3}, 2)
    at(redis, START + HOUR_MS)
    host(limited, 4)
    assert limited.projects.usage("vision").device_hours == pytest.approx(2, abs=0.1)
    between = submit_for(limited, "vision", 1)
    assert limited.attempts.place() == [between]
    limited.jobs.cancel(between)
    at(redis, START + HOUR_MS * 3 // 2 + 60_000)
    host(limited, 4)
    late = submit_for(limited, "vision", 1)
    assert limited.attempts.place() == []
    said = "project vision has used 3.0 of 3 device-hours in 3 h, and falls below that in 2 h at the earliest"
    assert reason(limited, late) == said
    (line,) = limited.queue.page(job_id=late).items
    assert line.start is None
    other = submit_for(limited, "speech", 1)
    assert limited.attempts.place() == [other]
    limited.jobs.cancel(job)
    at(redis, START + 3 * HOUR_MS - 600_000)
    host(limited, 4)
    assert limited.attempts.place() == []
    at(redis, START + 3 * HOUR_MS)
    host(limited, 4)
    assert limited.attempts.place() == [late]
    assert limited.projects.usage("vision").device_hours == pytest.approx(1, abs=0.1)


def test_hours_beyond_the_longest_window_are_forgotten(limited: Store, redis: redis_py.Redis) -> None:
    redis.hset(DEVICE_HOURS("vision"), mapping={str(hour): 1 for hour in range(744)})
    at(redis, START)
    host(limited, 1)
    job = submit_for(limited, "vision", 1)
    limited.attempts.place()
    at(redis, START + HOUR_MS)
    limited.jobs.cancel(job)
    kept: Any = redis.hkeys(DEVICE_HOURS("vision"))
    assert sorted(map(int, kept)) == [START // HOUR_MS, START // HOUR_MS + 1][: len(kept)]


def test_a_project_that_goes_leaves_no_quota(limited: Store, redis: redis_py.Redis) -> None:
    limited.projects.change("speech", {"devices": 2, "queued_jobs": 1})
    assert redis.hget(PLACEMENT_QUOTAS(), "speech") == b'{"devices":2}'
    redis.hset(DEVICE_HOURS("speech"), "1", 1)
    limited.projects.delete("speech")
    assert not redis.exists(PLACEMENT_QUOTAS(), DEVICE_HOURS("speech"))


def test_a_new_project_has_the_operators_quotas(broker: str, redis: redis_py.Redis, data: DataLayout) -> None:
    """It keeps them when they change, and may have others."""
    first = Store.connect(broker, data, replace(LIMITS, default_quotas="devices=2,queued_jobs=5"))
    assert (
        first.projects.create("vision").quotas
        == first.projects.get("vision").quotas
        == Quotas(devices=2, queued_jobs=5)
    )
    assert redis.hget(PLACEMENT_QUOTAS(), "vision") == b'{"devices":2}'
    with pytest.raises(Conflict):
        Store.connect(broker, data, LIMITS).projects.create("vision")
    assert first.projects.change("vision", {"devices": None}).quotas == Quotas(queued_jobs=5)
    assert not redis.exists(PLACEMENT_QUOTAS())


def test_changes_of_a_project_at_the_same_time_are_all_kept(limited: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read, others = projects._project, [{"devices": 3}]

    def read_before_another(name: str, text: str | None) -> Project:
        found = read(name, text)
        if others:
            limited.projects.change(name, others.pop())
        return found

    monkeypatch.setattr(projects, "_project", read_before_another)
    limited.projects.change("vision", description="lidar")
    found = limited.projects.get("vision")
    assert (found.description, found.quotas.devices) == ("lidar", 3)


def test_nobody_makes_room_for_a_job_over_its_quota(limited: Store, redis: redis_py.Redis) -> None:
    limited.projects.change("vision", {"devices": 1})
    at(redis, START)
    host(limited, 4)
    own, running = submit_for(limited, "vision", 1), submit_for(limited, "speech", 3, preemptible="1")
    assert sorted(limited.attempts.place()) == sorted([own, running])
    claim(limited, running)
    at(redis, START + 2 * BOUND_MS)
    host(limited, 4)
    urgent = submit_for(limited, "vision", 1, priority="5")
    assert limited.attempts.place() == []
    seen = stubs.read_preemptible(limited.client, 10)
    assert seen
    assert seen[0] == []
    redis.delete(PLACEMENT_IDLE())
    limited.projects.change("vision", {"devices": 2})
    assert limited.attempts.place() == []
    at(redis, START + 2 * BOUND_MS)
    redis.delete("trivet:preemption:pause")
    seen = stubs.read_preemptible(limited.client, 10)
    assert seen
    assert seen[0] == [urgent]


rows = st.lists(
    st.tuples(
        st.sampled_from(["vision", "default", "vision", "speech"]),
        st.sampled_from([0, 0, 0, 1]),
        st.integers(1, 4),
        st.sampled_from([0, BOUND_MS]),
    ),
    min_size=6,
    max_size=14,
)
quotas = st.dictionaries(st.sampled_from(["default", "vision", "speech"]), st.integers(0, 6), min_size=1)
_Row = tuple[str, str, int, int, int]


@settings(max_examples=examples(25, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=rows, most=quotas, room=st.integers(1, 20), ends=st.integers(0, 14))
def test_placement_follows_the_model(
    limited: Store, redis: redis_py.Redis, *, wanted: list[Any], most: dict[str, int], room: int, ends: int
) -> None:
    """What is placed on one host, and again when some of it has ended, is what the model takes."""
    redis.flushall()
    moment = START
    jobs = list[_Row]()
    for project, priority, ranks, waited in sorted(wanted, key=lambda row: -row[3]):
        at(redis, moment - waited)
        jobs.append((submit_for(limited, project, ranks, priority=str(priority)), project, priority, ranks, waited))
    for project, devices in most.items():
        redis.hset(PLACEMENT_QUOTAS(), project, f'{{"devices":{devices}}}')
    at(redis, moment)
    host(limited, room)
    left, held = list(jobs), list[_Row]()
    for _ in range(2):
        expected = _obvious(left, held, most, room)
        assert sorted(limited.attempts.place()) == sorted(row[0] for row in expected)
        held += expected
        left = [row for row in left if row not in held]
        for row in held[:ends]:
            limited.attempts.finish(claim(limited, row[0]), DONE)
        held = held[ends:]
        at(redis, moment)
        redis.delete("trivet:uses")
        for project in ("default", "vision", "speech"):
            devices = sum(row[3] for row in held if row[1] == project)
            if devices:
                redis.hset("trivet:uses", project, f"0 {devices} {moment}")


def _obvious(jobs: list[_Row], running: list[_Row], most: dict[str, int], total: int) -> list[_Row]:
    """Take the first job that fits in the fleet and in its project's quota, until none does."""
    left, placed = list(jobs), list[_Row]()
    while True:
        holding = running + placed
        free = total - sum(row[3] for row in holding)
        own = {
            project: sum(row[3] for row in holding if row[1] == project) for project in ("default", "vision", "speech")
        }
        room = {project: max(0, most[project] - own[project]) if project in most else 99 for project in own}
        uses = {project: Use(0.0).holding(count).share for project, count in own.items()}
        ordered = sorted(left, key=lambda row: (-row[2], -1.0 if row[4] else uses[row[1]], row[0]))
        barred, overdue, allowed = set[str](), False, list[_Row]()
        for row in ordered:
            _, project, _, ranks, waited = row
            if project in barred or overdue:
                continue
            if ranks > room[project]:
                if waited and ranks <= min(most[project], total):
                    barred.add(project)
            elif ranks <= free:
                allowed.append(row)
            elif waited and ranks <= total:
                overdue = True
        if not allowed:
            return placed
        placed.append(allowed[0])
        left.remove(allowed[0])
