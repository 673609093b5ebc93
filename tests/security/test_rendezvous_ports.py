"""Groups of ranks listen on loopback only, and run nothing that a stranger sends (B1)."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest
from sockets import attack, listeners, payload
from waiting import eventually
from worker_fleet import REAL_SUPERVISOR, SUPERVISOR, Fleet, family

from service.jobs.records import Conflict
from workers.supervisor.job_policy import JobPolicy

pytestmark = pytest.mark.distributed

READS_WITHIN_S = 8.0
"""Torch's own rendezvous reads its state every five seconds."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(SUPERVISOR, id="objects"),
        pytest.param(REAL_SUPERVISOR, id="training"),
    ],
)
def test_a_job_on_one_host_listens_on_loopback_only(fleet: Fleet, command: tuple[str, ...]) -> None:
    ref = fleet.submit("exchange", ranks=2, steps=100_000, data={"source": "digits"})
    supervisor = fleet.supervise(ref, command=command)
    seen = set()
    eventually(lambda: fleet.events(ref, "metric"))
    for _ in range(20):
        seen |= set(listeners([psutil.Process(supervisor.pid), *family(supervisor)]))
    with contextlib.suppress(Conflict):  # the stranger has ended it
        fleet.store.jobs.cancel(ref.job_id)
    eventually(lambda: fleet.job(ref).ended_at)
    assert seen, "gloo listens somewhere, or this test looks in the wrong place"
    assert [each for each in seen if not each.is_loopback] == []


@pytest.mark.slow
def test_what_a_stranger_writes_to_a_port_is_not_unpickled(fleet: Fleet, tmp_path: Path) -> None:
    """The stranger may well end the job: where a job has no network of its own, a port on loopback is open to every
    user of the host.
    """
    ref = fleet.submit("exchange", ranks=2)
    supervisor = fleet.supervise(ref, policy=JobPolicy("none"))
    marker, moments = tmp_path / "owned", [0.0]

    def attacked_for_long() -> bool:
        for each in listeners(family(supervisor)):
            if attack(each.address, each.port, payload(marker), f"{ref.job_id}-1"):
                moments.append(time.monotonic())
        if len(moments) == 1:
            return False
        return bool(marker.exists() or fleet.job(ref).ended_at or time.monotonic() - moments[1] > READS_WITHIN_S)

    eventually(attacked_for_long)
    with contextlib.suppress(Conflict):  # the stranger has ended it
        fleet.store.jobs.cancel(ref.job_id)
    eventually(lambda: fleet.job(ref).ended_at)
    assert not marker.exists()
