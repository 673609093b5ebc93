"""Jobs that a launcher gets devices for: they wait apart from placement, and begin on the hosts of an allocation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import redis as redis_py
from store_builders import DONE, LIMITS, World, train
from store_invariants import Snapshot

from service.jobs.files import DataLayout
from service.jobs.records import AllocatedDevices, Allocation, AttemptRef, Job, PartOutcome, Rejected, Superseded
from service.jobs.store import HostReport, KnownJob, Store
from service.jobs.store.keyspace import LEASES, OUTBOX, PENDING, PENDING_GROUPS

FIRST = Allocation(launcher="slurm", id="7.0", facts={"partition": "main"})
HOSTS = ["slurm-7.0-0", "slurm-7.0-1"]
Arrive = Callable[..., None]


@pytest.fixture
def wide(store: Store) -> Job:
    job, _ = store.jobs.submit(train(6, launcher="slurm", max_hosts=2, device="cpu", priority=3, timeout_s=9), "ada")
    return job


@pytest.fixture
def arrive(store: Store) -> Arrive:
    """A host of an allocation is heard of."""

    def beat(name: str, job: Job, devices: int, live: tuple[str, ...] = ()) -> None:
        has = AllocatedDevices(launcher="slurm", id="7.0", job=job.id, pool="cpu", devices=devices)
        store.hosts.beat(HostReport(name, "10.0.0.5", allocation=has, live=live))

    return beat


def test_a_job_of_a_launcher_is_no_job_of_placement(store: Store, wide: Job) -> None:
    store.hosts.beat(HostReport("big", "10.0.0.1", cpu_slots=64))
    assert store.attempts.place() == []
    job = store.jobs.get(wide.id)
    assert (job.state, job.launcher, job.reason) == (
        "queued",
        "slurm",
        "waits for a worker that serves the launcher slurm",
    )
    pending, known = store.launching.read("slurm", [wide.id, "job_gone"])
    assert [(one.job_id, one.ranks, one.max_hosts, one.device, one.priority, one.timeout_s) for one in pending] == [
        (wide.id, 6, 2, "cpu", 3, 9.0)
    ]
    assert known == {wide.id: KnownJob("queued", ""), "job_gone": KnownJob("", "")}
    store.launching.tell("slurm", {wide.id: "Slurm job 7 is pending, Resources", "job_gone": "nothing"})
    assert store.jobs.get(wide.id).reason == "Slurm job 7 is pending, Resources"
    (line,) = store.queue.page()
    assert (line.place, line.reason) == (1, "Slurm job 7 is pending, Resources")


def test_an_attempt_begins_once_all_hosts_are_heard_of_and_ends_as_any_other(
    store: Store, wide: Job, arrive: Arrive
) -> None:
    assert store.launching.place(wide.id, FIRST, HOSTS) == "waits"
    arrive(HOSTS[0], wide, 4)
    assert store.launching.place(wide.id, FIRST, HOSTS) == "waits"
    arrive(HOSTS[1], wide, 2)
    assert [store.launching.place(wide.id, FIRST, HOSTS) for _ in range(2)] == [1, 1], "each host asks"
    other = Allocation(launcher="slurm", id="8.0")
    assert store.launching.place(wide.id, other, ["slurm-8.0-0"]) == "over"
    job = store.jobs.get(wide.id)
    assert job.state == "starting"
    assert job.allocation == FIRST
    assert [(share.host, share.devices) for share in job.placement] == [(HOSTS[0], (0, 1, 2, 3)), (HOSTS[1], (0, 1))]
    assert store.attempts.due() == [], "their own hosts start them"
    for host in HOSTS:
        claim = store.attempts.claim(AttemptRef(wide.id, 1, host), "supervisor")
        assert claim.leader_address == "10.0.0.5"
    assert store.jobs.get(wide.id).state == "running"
    assert store.launching.read("slurm", [wide.id]) == ([], {wide.id: KnownJob("running", "7.0")})
    for host in HOSTS:
        store.attempts.finish(AttemptRef(wide.id, 1, host), DONE)
    assert store.jobs.get(wide.id).state == "succeeded"
    assert store.launching.place(wide.id, FIRST, HOSTS) == "over"
    for host in HOSTS:
        store.hosts.leave(host)
    assert store.hosts.list() == []


def test_a_lost_attempt_waits_for_its_launcher_again(store: Store, redis: redis_py.Redis, arrive: Arrive) -> None:
    """And the supervisor that was taken for lost is refused once another has claimed the job."""
    job, _ = store.jobs.submit(train(2, launcher="slurm", device="cpu"), "ada")
    arrive("slurm-7.0-0", job, 2)
    assert store.launching.place(job.id, FIRST, ["slurm-7.0-0"]) == 1
    old = AttemptRef(job.id, 1, "slurm-7.0-0")
    store.attempts.claim(old, "supervisor")
    redis.zadd(LEASES(), {f"{job.id}:1:slurm-7.0-0": 1})
    assert store.attempts.reap() == [job.id]
    assert store.jobs.get(job.id).state == "queued"
    assert store.attempts.place() == []
    assert [one.job_id for one in store.launching.read("slurm", [])[0]] == [job.id]
    second = Allocation(launcher="slurm", id="7.1")
    has = AllocatedDevices(launcher="slurm", id="7.1", job=job.id, pool="cpu", devices=2)
    store.hosts.beat(HostReport("slurm-7.1-0", "10.0.0.5", allocation=has))
    assert store.launching.place(job.id, second, ["slurm-7.1-0"]) == 2
    store.attempts.claim(AttemptRef(job.id, 2, "slurm-7.1-0"), "another")
    with pytest.raises(Superseded):
        store.attempts.finish(old, DONE)
    store.attempts.finish(AttemptRef(job.id, 2, "slurm-7.1-0"), PartOutcome("interrupted"))
    assert (store.jobs.get(job.id).state, store.jobs.get(job.id).allocation) == ("queued", second)
    store.jobs.cancel(job.id)
    assert store.launching.read("slurm", [job.id]) == ([], {job.id: KnownJob("cancelled", "7.1")})
    snapshot = Snapshot(redis)
    assert snapshot.strays() == []
    assert [snapshot.members(key()) for key in (PENDING, PENDING_GROUPS, LEASES, OUTBOX)] == [set()] * 4


def test_a_host_of_an_allocation_that_went_silent_is_forgotten_with_its_lease(
    store: Store, arrive: Arrive, world: World
) -> None:
    job, _ = store.jobs.submit(train(2, launcher="slurm", device="cpu"), "ada")
    arrive("slurm-7.0-0", job, 2)
    store.hosts.beat(HostReport("local", "10.0.0.1", cpu_slots=2))
    store.launching.place(job.id, FIRST, ["slurm-7.0-0"])
    store.attempts.claim(AttemptRef(job.id, 1, "slurm-7.0-0"), "supervisor")
    world.pass_time(LIMITS.heartbeat_s + 1)
    store.attempts.reap()
    world.pass_time(LIMITS.lease_s + 1)
    store.attempts.reap()
    store.attempts.reap()
    assert [host.name for host in store.hosts.list()] == ["local"]
    assert store.jobs.get(job.id).state == "queued"


def test_quotas_keep_jobs_of_launchers_back_too(store: Store, arrive: Arrive) -> None:
    store.projects.create("small")
    store.projects.change("small", {"devices": 2})
    first, second = (
        store.jobs.submit(train(2, launcher="slurm", device="cpu"), "ada", project="small")[0] for _ in range(2)
    )
    arrive("slurm-7.0-0", first, 2)
    assert store.launching.place(first.id, FIRST, ["slurm-7.0-0"]) == 1
    assert store.launching.read("slurm", [])[0] == []
    other = Allocation(launcher="slurm", id="8.0")
    arrive("slurm-8.0-0", second, 2)
    assert store.launching.place(second.id, other, ["slurm-8.0-0"]) == "over"
    assert "uses 2 of 2 devices" in (store.jobs.get(second.id).reason or "")


def test_one_worker_at_a_time_asks_a_launcher(store: Store) -> None:
    assert store.launching.hold("slurm", "login", 60)
    assert store.launching.hold("slurm", "login", 60)
    assert not store.launching.hold("slurm", "other", 60)
    assert store.launching.hold("flux", "other", 60)


def test_what_gives_devices_is_the_specs_choice_then_the_operators(store: Store, data: DataLayout) -> None:
    by_slurm = Store.connect(store.url, data, replace(LIMITS, launcher="slurm"))
    unsaid, _ = by_slurm.jobs.submit(train(), "ada")
    said, _ = by_slurm.jobs.submit(train(launcher="local"), "ada")
    assert (unsaid.launcher, said.launcher) == ("slurm", "local")
    by_slurm.close()
    with pytest.raises(Rejected) as refused:
        store.jobs.submit(train(launcher="flux"), "ada")
    (problem,) = refused.value.problems
    assert (problem.path, problem.message) == (
        "launcher",
        "there is no launcher flux; there are local, kubernetes, ray, slurm",
    )
