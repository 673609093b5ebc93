"""What is asked of a launcher follows from what jobs want and what its scheduler has, whatever was lost in between."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import redis as redis_py
from hypothesis import given
from hypothesis import strategies as st
from worker_fleet import train_spec

from service.jobs.files import DataLayout
from service.jobs.host import SupervisorRegistry
from service.jobs.store import HostReport, KnownJob, PendingLaunch, Store
from workers.agent.launching import LauncherDesk, Planner
from workers.launchers import (
    AllocatedHost,
    AllocationRequest,
    Booking,
    Launcher,
    LauncherContext,
    LauncherUnavailable,
)

PATIENCE_S = 40.0


def pending(job_id: str) -> PendingLaunch:
    return PendingLaunch(job_id, "train", 1, 1, "cpu", 0, None)


def planner() -> Planner:
    return Planner("slurm", PATIENCE_S)


def test_what_waits_for_a_job_that_is_over_is_taken_back_at_once_and_what_runs_for_it_later() -> None:
    plans = planner()
    allocations = [Booking("1.0", "a", True), Booking("2.0", "b", False), Booking("3.0", "gone", False)]
    known = {"a": KnownJob("cancelled", ""), "b": KnownJob("succeeded", "2.0"), "gone": KnownJob("", "")}
    assert [one.id for one in plans.plan([], known, allocations, 0.0).cancel] == ["1.0"]
    assert plans.plan([], known, allocations[1:], PATIENCE_S - 1).cancel == []
    assert {one.id for one in plans.plan([], known, allocations[1:], PATIENCE_S).cancel} == {"2.0", "3.0"}


def test_a_job_that_runs_keeps_the_allocation_that_it_runs_on() -> None:
    known = {"a": KnownJob("running", "1.0")}
    plan = planner().plan([], known, [Booking("1.0", "a", False), Booking("2.0", "a", True)], 0.0)
    assert [one.id for one in plan.cancel] == ["2.0"]


def test_an_allocation_serves_one_attempt() -> None:
    """While the hosts of the last one leave, nothing is asked for; they are not waited for without end."""
    plans, allocation = planner(), Booking("1.0", "a", False)
    known = {"a": KnownJob("queued", "1.0")}
    for now, cancelled in ((0.0, []), (PATIENCE_S, [allocation])):
        plan = plans.plan([pending("a")], known, [allocation], now)
        assert (plan.request, plan.cancel) == ([], cancelled)
    again = plans.plan([pending("a")], known, [Booking("1.1", "a", True, "Resources")], 50.0)
    assert (again.request, again.cancel, again.reasons) == ([], [], {"a": "Resources"}), (
        "started by the scheduler again"
    )


def test_devices_on_which_nothing_begins_are_given_back_and_asked_for_anew() -> None:
    """Such as where Slurm shows a batch job as running, and a node has lost it."""
    plans, known, allocation = planner(), {"a": KnownJob("queued", "")}, Booking("1.1", "a", False)
    late_s = plans.starts_within_s
    for now, cancelled in ((0.0, []), (late_s - 1, []), (late_s, []), (late_s + PATIENCE_S, [allocation])):
        plan = plans.plan([pending("a")], known, [allocation], now)
        assert (plan.request, plan.cancel) == ([], cancelled)
    assert [job.job_id for job in plans.plan([pending("a")], known, [], late_s + 50).request] == ["a"]


def test_what_the_scheduler_has_given_up_is_taken_back_at_once_and_asked_for_anew() -> None:
    plans, known = planner(), {"a": KnownJob("queued", "1.0")}
    held = Booking("1.1", "a", True, "launch failed requeued held", is_given_up=True)
    plan = plans.plan([pending("a")], known, [held], 0.0)
    assert (plan.request, plan.cancel, plan.reasons) == ([], [held], {})
    assert [job.job_id for job in plans.plan([pending("a")], known, [], 1.0).request] == ["a"]


def test_what_a_scheduler_cannot_take_back_keeps_no_job_waiting() -> None:
    """Such as what Slurm shows as completing while a node does not say that nothing of it is left."""
    plans, known, stuck = planner(), {"a": KnownJob("queued", "1.0")}, Booking("1.0", "a", False)
    for now, asked in ((0.0, []), (2 * PATIENCE_S - 1, []), (2 * PATIENCE_S, ["a"])):
        plan = plans.plan([pending("a")], known, [stuck], now)
        assert [job.job_id for job in plan.request] == asked
    plans.requested("a", 2 * PATIENCE_S)
    plan = plans.plan([pending("a")], known, [stuck, Booking("2.0", "a", True)], 3 * PATIENCE_S)
    assert (plan.request, plan.cancel) == ([], [stuck])


class StubbornLauncher(Launcher):
    """Takes nothing back."""

    asked: list[str]

    def describe(self) -> str:
        return "one node"

    def request(self, request: AllocationRequest) -> str:
        self.asked.append(request.job_id)
        return "2"

    def allocations(self) -> list[Booking]:
        return [Booking("1.0", "gone", True)]

    def cancel(self, allocations: Sequence[Booking]) -> None:
        raise LauncherUnavailable(f"it does not let go of {allocations[0].id}")

    @staticmethod
    def here(environment: Mapping[str, str]) -> AllocatedHost:
        raise NotImplementedError


def test_a_scheduler_that_does_not_take_something_back_is_still_asked_for_other_jobs(
    broker: str, redis: redis_py.Redis, data: DataLayout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.connect(broker, data)
    job, _ = store.jobs.submit(train_spec("other", launcher="slurm"), "ada")
    launcher = StubbornLauncher(LauncherContext("someone", tmp_path, "", 10.0))
    launcher.asked = []
    LauncherDesk("slurm", launcher, store, "login", folder=tmp_path, supervisor=["supervisor"]).tend()
    assert launcher.asked == [job.id]
    assert store.jobs.get(job.id).reason == "waits for slurm, which calls it 2"
    assert "it does not let go of 1.0" in caplog.text
    store.close()


def test_folders_of_killed_hosts_of_allocations_are_deleted(
    broker: str, redis: redis_py.Redis, data: DataLayout, tmp_path: Path
) -> None:
    """Not those of hosts that the store knows, of other workers, or of late."""
    with contextlib.closing(Store.connect(broker, data)) as store:
        store.hosts.beat(HostReport("slurm-2-0", "b"))
        for name, age_s in (
            ("slurm-1-0", 1e5),
            ("slurm-2-0", 1e5),
            ("slurm-login", 1e5),
            ("ray-1-0", 1e5),
            ("slurm-3-0", 0),
        ):
            data.host(name).mkdir(parents=True)
            if name == "slurm-login":
                SupervisorRegistry(data.host(name)).note_heartbeat()
            os.utime(data.host(name), (time.time() - age_s, time.time() - age_s))
        launcher = StubbornLauncher(LauncherContext("someone", tmp_path, "", 10.0))
        LauncherDesk("slurm", launcher, store, "login", folder=tmp_path, supervisor=[]).delete_leftovers(data)
    assert sorted(path.name for path in data.hosts.iterdir()) == ["ray-1-0", "slurm-2-0", "slurm-3-0", "slurm-login"]


def test_of_two_allocations_of_a_job_the_first_with_devices_is_kept() -> None:
    known = {"a": KnownJob("queued", "")}
    allocations = [Booking("1.0", "a", True), Booking("2.0", "a", False)]
    assert [one.id for one in planner().plan([pending("a")], known, allocations, 0.0).cancel] == ["1.0"]


def test_what_comes_to_nothing_is_asked_for_again_ever_later_and_the_job_says_so() -> None:
    plans, job, asked = planner(), pending("a"), []
    for second in range(70):
        plan = plans.plan([job], {}, [], float(second))
        if plan.request:
            asked.append(second)
            plans.requested("a", float(second), "slurm refused it: invalid account")
    assert asked == [0, 1, 3, 7, 15, 31, 63]
    assert plans.plan([job], {}, [], 71.0).reasons == {"a": "slurm refused it: invalid account"}
    plans.plan([], {"a": KnownJob("running", "9.0")}, [Booking("9.0", "a", False)], 80.0)
    assert plans.plan([job], {}, [], 81.0).request == [job], "an attempt that ran is no try that came to nothing"


@dataclass
class World:
    """Jobs, and a scheduler that has what it was asked for."""

    states: dict[str, KnownJob]
    allocations: dict[str, Booking] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    made: int = 0

    def look(self, plans: Planner, now: float) -> None:
        found = list(self.allocations.values())
        wanted = [pending(job_id) for job_id, job in self.states.items() if job.state == "queued"]
        plan = plans.plan(wanted, {one.job_id: self.states[one.job_id] for one in found}, found, now)
        for one in plan.cancel:
            job = self.states[one.job_id]
            assert not (job.state == "running" and job.allocation == one.id), "nothing that runs is taken back"
            del self.allocations[one.id]
        for job in plan.request:
            assert all(one.job_id != job.job_id for one in self.allocations.values())
            self.made += 1
            self.allocations[f"{self.made}.0"] = Booking(f"{self.made}.0", job.job_id, True)
            plans.requested(job.job_id, now)

    def give(self, allocation: Booking) -> None:
        """The scheduler gives devices, and the hosts begin the attempt if there is one to begin."""
        self.allocations[allocation.id] = Booking(allocation.id, allocation.job_id, False)
        if self.states[allocation.job_id].state == "queued":
            self.states[allocation.job_id] = KnownJob("running", allocation.id)
            self.attempts[allocation.job_id] = self.attempts.get(allocation.job_id, 0) + 1
        else:
            del self.allocations[allocation.id]

    def end(self, job_id: str, state: str) -> None:
        job = self.states[job_id]
        self.allocations.pop(job.allocation, None)
        self.states[job_id] = KnownJob(state, job.allocation)


steps = st.lists(
    st.tuples(st.sampled_from(["give", "hold", "lose", "finish", "vanish", "restart", "cancel"]), st.integers(0, 3))
)


@given(steps)
def test_every_job_runs_in_the_end_and_nothing_is_left(script: list[tuple[str, int]]) -> None:
    """However devices are given, attempts lost, allocations gone and workers restarted in between."""
    world = World({f"job{index}": KnownJob("queued", "") for index in range(4)})
    plans, now = planner(), 0.0
    for what, which in script:
        now += 1.0
        world.look(plans, now)
        job_id = f"job{which}"
        job, own = world.states[job_id], [one for one in world.allocations.values() if one.job_id == job_id]
        if what == "give" and own and own[0].is_waiting and not own[0].is_given_up:
            world.give(own[0])
        elif what == "hold" and own and own[0].is_waiting:
            world.allocations[own[0].id] = replace(own[0], is_given_up=True)
        elif what in {"lose", "finish"} and job.state == "running":
            world.end(job_id, "queued" if what == "lose" else "succeeded")
        elif what == "vanish" and own and own[0].is_waiting:
            del world.allocations[own[0].id]
        elif what == "restart":
            plans = planner()
        elif what == "cancel" and job.state == "queued":
            world.states[job_id] = KnownJob("cancelled", job.allocation)
    for _ in range(200):
        now += 1.0
        world.look(plans, now)
        for one in list(world.allocations.values()):
            if one.is_waiting and not one.is_given_up:
                world.give(one)
        for job_id, job in list(world.states.items()):
            if job.state == "running":
                world.end(job_id, "succeeded")
    assert {job.state for job in world.states.values()} <= {"succeeded", "cancelled"}
    assert world.allocations == {}
