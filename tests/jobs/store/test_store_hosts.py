"""Hosts: registration, restart, resizing, draining, leaving, being forgotten."""

from __future__ import annotations

import pytest
from store_builders import DONE, World, train

from service.jobs.records import AttemptRef, FleetCapacity, Holding, NotFound, PartOutcome, Rejected
from service.jobs.store import HostReport, Store
from service.jobs.store.keyspace import HOSTS


def free(store: Store, name: str = "a", pool: str = "cpu") -> tuple[int, ...]:
    return next(host.free[pool] for host in store.hosts.list() if host.name == name)


def test_a_host_shows_what_it_reported(store: Store, world: World) -> None:
    world.beat("b", cpu=1)
    reply = world.beat("a", cpu=12, cuda=2)
    assert (reply.drain, reply.kill) == (False, ())
    job = world.submit(device="cuda")
    world.start(job)
    host, other = store.hosts.list()
    assert (host.name, other.name) == ("a", "b")
    assert (host.alive, host.draining, host.address) == (True, False, "a.example")
    assert (host.cuda, host.cpu_slots) == (("Test GPU", "Test GPU"), 12)
    assert host.free == {"cuda": (1,), "cpu": tuple(range(12))}
    assert host.running == (job.id,)
    assert host.held == (Holding(job=job.id, attempt=1, pool="cuda", devices=(0,)),)
    assert other.held == ()
    assert host.versions == {"trivet": "0"}
    assert store.hosts.capacity() == FleetCapacity(
        devices={"cuda": 2, "cpu": 13}, auto_pool="cuda", packages=frozenset({"trivet"})
    )


def test_capacity_counts_only_hosts_that_are_heard_of(store: Store, world: World) -> None:
    assert store.hosts.capacity() is None
    world.beat("a", cpu=4)
    world.beat("b", cpu=2)
    world.silence("a")
    assert store.hosts.capacity() == FleetCapacity(devices={"cpu": 2}, auto_pool="cpu", packages=frozenset({"trivet"}))
    assert [host.alive for host in store.hosts.list()] == [False, True]


def test_auto_stands_for_cuda_as_long_as_a_host_with_it_is_heard_of_and_not_drained(store: Store, world: World) -> None:
    def capacity() -> tuple[dict[str, int], str]:
        fleet = store.hosts.capacity()
        assert fleet is not None
        return fleet.devices, fleet.auto_pool

    world.beat("a", cpu=0, cuda=2)
    world.beat("b", cpu=2)
    assert capacity() == ({"cuda": 2, "cpu": 2}, "cuda")
    store.hosts.drain("a")
    assert capacity() == ({"cuda": 2, "cpu": 2}, "cpu")
    store.hosts.resume("a")
    assert capacity() == ({"cuda": 2, "cpu": 2}, "cuda")
    world.silence("a")
    assert capacity() == ({"cpu": 2}, "cpu")


def test_float8_on_auto_is_refused_while_the_hosts_with_cuda_are_drained(store: Store, world: World) -> None:
    world.beat("a", cpu=0, cuda=1)
    world.beat("b", cpu=2)
    store.hosts.drain("a")
    float8 = {"precision": {"float8": True}, "batch": {"global": 16}}
    with pytest.raises(Rejected, match="this job would run on cpu"):
        world.submit(device="auto", **float8)
    world.submit(device="auto")
    world.submit(device="cuda", **float8)
    store.hosts.resume("a")
    world.submit(device="auto", **float8)


def test_a_restarted_agent_neither_frees_twice_nor_leaks(store: Store, world: World) -> None:
    world.beat("a", cpu=4)
    (ref,) = world.start(world.submit(2))
    assert free(store) == (2, 3)
    world.beat("a", cpu=4)
    assert free(store) == (2, 3)
    store.attempts.finish(ref, PartOutcome("succeeded"))
    assert free(store) == (0, 1, 2, 3)


def test_devices_that_are_gone_are_not_freed_and_new_ones_are_free(store: Store, world: World) -> None:
    world.beat("a", cpu=4)
    (ref,) = world.start(world.submit(3))
    world.beat("a", cpu=2)
    assert free(store) == ()
    store.attempts.finish(ref, PartOutcome("succeeded"))
    assert free(store) == (0, 1)
    world.beat("a", cpu=3)
    assert free(store) == (0, 1, 2)


def test_draining_is_told_to_the_host_and_outlives_a_restart(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    assert store.hosts.drain("a").draining
    assert world.beat("a", cpu=1).drain
    assert not store.hosts.resume("a").draining
    assert not world.beat("a", cpu=1).drain


@pytest.mark.parametrize("call", ["drain", "resume", "leave"])
def test_unknown_hosts_are_not_found(store: Store, call: str) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        getattr(store.hosts, call)("nowhere")


def test_an_idle_host_that_leaves_is_gone_and_a_busy_one_stays_listed(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    (ref,) = world.start(world.submit())
    world.beat("b", cpu=1)
    store.hosts.leave("a")
    store.hosts.leave("b")
    assert [(host.name, host.alive) for host in store.hosts.list()] == [("a", False)]
    assert store.attempts.renew(ref) == "run"


@pytest.mark.parametrize("drained", [False, True])
def test_a_host_is_forgotten_after_a_day_unless_an_operator_drained_it(
    store: Store, world: World, drained: bool
) -> None:
    world.beat("a", cpu=1)
    if drained:
        store.hosts.drain("a")
    world.redis.zadd(HOSTS(), {"a": 1})
    store.attempts.reap()
    assert [host.name for host in store.hosts.list()] == (["a"] if drained else [])


def test_no_project_is_charged_for_devices_of_a_silent_host_that_were_lost(store: Store, world: World) -> None:
    """It may never come back, as a drained one that was switched off; a supervisor that does is charged again."""

    def charged() -> int:
        return sum(use.held for use in store.shares.uses().values())

    world.beat("a", cpu=1)
    (ref,) = world.start(world.submit())
    world.expire(ref)
    store.attempts.reap()
    assert charged() == 1
    store.hosts.leave("a")
    store.attempts.reap()
    assert (charged(), store.hosts.list()[0].held[0].lost) == (0, True)
    assert (store.attempts.renew(ref), charged()) == ("run", 1)
    store.attempts.finish(ref, DONE)
    assert charged() == 0


def test_a_silent_host_is_not_forgotten_while_a_supervisor_there_renews(store: Store, world: World) -> None:
    world.beat("a", cpu=1)
    (ref,) = world.start(store.jobs.submit(train(), "ada")[0])
    world.redis.zadd(HOSTS(), {"a": 1})
    store.attempts.reap()
    assert [host.name for host in store.hosts.list()] == ["a"]
    world.expire(ref)
    store.attempts.reap()
    assert store.hosts.list() == []


def test_attempts_that_nobody_knows_are_to_be_killed(store: Store, world: World) -> None:
    name = "job_" + "0" * 20
    assert world.beat("a", cpu=1, live=(f"{name}:3",)).kill == (AttemptRef(name, 3, "a"),)


@pytest.mark.parametrize("name", ["", "a:b", "a b", "../a", "x" * 201])
def test_host_names_that_would_confuse_keys_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="host name"):
        HostReport(name, "address")


def test_a_negative_number_of_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu_slots"):
        HostReport("a", "address", cpu_slots=-1)
