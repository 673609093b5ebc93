"""A keeper that is stopped ends nothing: whoever waits for it does, and its devices come back."""

from __future__ import annotations

import pytest
from waiting import LIMIT_S, eventually
from worker_fleet import SHORT_LEASES, Fleet, all_gone, family

from service.jobs.host import SupervisorRegistry

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("limits", [SHORT_LEASES], ids=["told soon"])
def test_a_stopped_keeper_does_not_hold_up_a_cancel(fleet: Fleet) -> None:
    ref = fleet.submit("endless", ranks=2)
    supervisor = fleet.supervise(ref, grace_s=2.0)
    eventually(lambda: fleet.printed(ref, "working"))
    started = family(supervisor)
    keeper = started[0]
    keeper.suspend()
    fleet.store.jobs.cancel(ref.job_id)
    assert fleet.ended(ref).state == "cancelled"
    assert supervisor.wait(LIMIT_S) == 0
    assert all_gone(started)
    assert fleet.store.hosts.list()[0].free["cpu"] == (0, 1, 2, 3)


def test_a_worker_ends_the_group_of_a_stopped_keeper_whose_supervisor_is_dead(fleet: Fleet) -> None:
    """As its heartbeats do, for an attempt that is no longer current: first the supervisor, then what it left."""
    ref = fleet.submit("endless", ranks=2)
    supervisor = fleet.supervise(ref)
    eventually(lambda: fleet.printed(ref, "working"))
    started = family(supervisor)
    started[0].suspend()
    registry = SupervisorRegistry(fleet.data.host(ref.host))
    registry.kill(ref)
    supervisor.wait(LIMIT_S)
    eventually(lambda: registry.kill(ref) or registry.live() == ())
    assert all_gone(started)
