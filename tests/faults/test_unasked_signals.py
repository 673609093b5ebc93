"""Signals that nobody asked the service for: a job that one of them cuts short never says that it succeeded."""

from __future__ import annotations

import signal
from typing import Any

import psutil
import pytest
from waiting import eventually
from worker_fleet import REAL_SUPERVISOR, SHORT_LEASES, Fleet, all_gone, processes_of, rank_process, train_spec

from service.jobs.records import AttemptRef
from service.jobs.spec.verify import VerifySpec
from service.jobs.store import StoreLimits

pytestmark = pytest.mark.distributed

STEPS = 3000
ROWS = 300
NETWORK = {"family": "mlp", "in_features": 64, "hidden": [64], "out_features": 10}
ROBUSTNESS = {"data": {"source": "digits"}, "count": ROWS, "eps": 0.01}
VERIFY: dict[str, Any] = {
    "model": NETWORK,
    "property": {"robustness": ROBUSTNESS},
    "budget": {"batch": 1},
    "parallel": {"dp_shard": 2},
    "device": "cpu",
}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_a_rank_fails_a_training_and_names_the_rank(fleet: Fleet, rank: int) -> None:
    ref = fleet.place(train_spec("long", ranks=2, steps=STEPS))
    fleet.supervise(ref, command=REAL_SUPERVISOR)
    eventually(lambda: fleet.events(ref, "metric"))
    rank_process(ref, rank).send_signal(signal.SIGTERM)
    assert_died_by_sigterm(fleet, ref, rank)
    assert "model.safetensors" not in {each.name for each in fleet.store.artifacts.list(ref.job_id)}


@pytest.mark.slow
def test_sigterm_to_a_rank_fails_a_verification_and_names_the_rank(fleet: Fleet) -> None:
    ref = fleet.place(VerifySpec.model_validate(VERIFY))
    fleet.supervise(ref, command=REAL_SUPERVISOR)
    eventually(lambda: fleet.events(ref, "bound"))
    rank_process(ref, 1).send_signal(signal.SIGTERM)
    assert_died_by_sigterm(fleet, ref, 1)


def assert_died_by_sigterm(fleet: Fleet, ref: AttemptRef, rank: int) -> None:
    job = fleet.ended(ref)
    assert (job.state, job.result) == ("failed", None)
    assert job.error is not None
    assert (job.error.type, job.error.rank) == ("RankDied", rank)
    assert "SIGTERM, which the service did not send" in job.error.message
    assert processes_of(ref) == []


LOST = {
    ("supervisor", signal.SIGTERM): "SIGTERM",
    ("supervisor", signal.SIGINT): "attempt 1: the service on its host stopped; queued again",
    ("supervisor", signal.SIGKILL): "stopped renewing its lease; queued again without using a retry",
    ("keeper", signal.SIGKILL): "keeps the group together was ended by SIGKILL",
    ("keeper", signal.SIGTERM): "keeps the group together was ended by SIGTERM",
}
"""What costs no retry, and what the job says then."""


@pytest.mark.parametrize(
    ("number", "limits"),
    [
        pytest.param(signal.SIGKILL, StoreLimits(lease_s=60.0), id="SIGKILL"),
        pytest.param(signal.SIGTERM, StoreLimits(lease_s=60.0), id="SIGTERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, SHORT_LEASES, id="SIGINT", marks=pytest.mark.slow),
    ],
)
def test_no_signal_to_any_process_of_a_job_makes_it_a_success(fleet: Fleet, number: signal.Signals) -> None:
    """Losing a process of the service uses no retry; losing torchrun or a rank fails the attempt. No process is left,
    and no device held.
    """
    victims: dict[str, tuple[AttemptRef, psutil.Process]] = {}
    refs = {role: fleet.submit("endless") for role in ("supervisor", "keeper", "launcher", "rank")}
    supervisors = {role: psutil.Process(fleet.supervise(ref).pid) for role, ref in refs.items()}
    for role, ref in refs.items():
        supervisor = supervisors[role]
        eventually(lambda ref=ref: fleet.printed(ref, "working"))
        keeper = supervisor.children()[0]
        launcher = keeper.children()[0]
        own = {"supervisor": supervisor, "keeper": keeper, "launcher": launcher, "rank": rank_process(ref, 0)}
        victims[role] = (ref, own[role])
    for _, process in victims.values():
        process.send_signal(number)
    for role, (ref, process) in victims.items():
        if (role, number) == ("keeper", signal.SIGINT):  # which it does not take
            assert fleet.job(ref).state == "running"
            fleet.store.jobs.cancel(ref.job_id)
            assert fleet.ended(ref).state == "cancelled"
            continue
        eventually(lambda process=process: all_gone([process]))
        if (role, number) == ("supervisor", signal.SIGKILL):  # so that nobody is left to report the loss
            fleet.expire_lease(ref)
        eventually(lambda ref=ref: fleet.store.attempts.reap() or fleet.job(ref).state != "running")
        job = fleet.job(ref)
        assert (job.state, job.attempt) == ("queued" if (role, number) in LOST else "failed", 1), (role, job)
        assert LOST.get((role, number), "") in (job.reason or "")
        if role == "launcher":
            assert job.error is not None
            assert (job.error.type, job.error.rank) == ("LaunchFailed", None)
            assert f"torchrun was ended by {number.name}" in job.error.message
        assert job.result is None
        eventually(lambda ref=ref: not processes_of(ref))
    fleet.beat()
    assert fleet.store.hosts.list()[0].free["cpu"] == (0, 1, 2, 3)
