"""A real training makes room for a more important job, goes on from its checkpoint, and ends as if it had not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from running_service import Service, start, stop

pytestmark = pytest.mark.distributed

TRAIN: dict[str, Any] = {
    "kind": "train",
    "model": {"family": "mlp", "in_features": 64, "hidden": [256, 256], "out_features": 10},
    "data": {"source": "digits"},
    "batch": {"global": 128},
    "steps": 1000,
    "preemptible": True,
}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with room for one rank, which asks for room at once and renews leases often."""
    running = start(
        tmp_path_factory.mktemp("narrow") / "data",
        TRIVET_CPU_SLOTS="1",
        TRIVET_PREEMPTION_MIN_RUN_S="0",
        TRIVET_LEASE_S="10",
        TRIVET_WARM_SUPERVISORS="1",  # four attempts
    )
    yield running
    stop(running)


@pytest.mark.slow(25)
def test_a_preempted_training_resumes_and_ends_the_same(narrow: Service) -> None:
    preempted = narrow.submit(TRAIN)["id"]
    narrow.wait(preempted, lambda job: job["state"] == "running" and (job["progress"] or {}).get("done", 0) > 0)
    urgent = narrow.submit({**TRAIN, "steps": 1, "priority": 10, "preemptible": False})["id"]
    assert narrow.wait(urgent)["state"] == "succeeded"
    assert narrow.job(preempted)["state"] != "succeeded"
    ended = narrow.wait(preempted)
    assert (ended["state"], ended["attempt"]) == ("succeeded", 2), ended
    events = narrow.http.get(f"/v1/jobs/{preempted}/events", params={"types": "state"}).json()["items"]
    reasons = [event.get("reason") for event in events]
    assert f"attempt 1: preempted by job {urgent}; queued again" in reasons
    undisturbed = narrow.wait(narrow.submit({**TRAIN, "name": "undisturbed"})["id"])
    assert undisturbed["attempt"] == 1
    assert ended["result"]["eval_loss"] == undisturbed["result"]["eval_loss"]
