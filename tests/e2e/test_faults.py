"""What goes wrong ends in the right state, says why, and leaves no process behind."""

from __future__ import annotations

import time
from typing import Any

import pytest
from running_service import Service

pytestmark = pytest.mark.distributed

LONG: dict[str, Any] = {
    "kind": "train",
    "model": {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10},
    "data": {"source": "digits"},
    "steps": 1_000_000,
    "parallel": {"dp_shard": 2},
}


def gone(service: Service, job_id: str, within_s: float = 300.0) -> bool:
    deadline = time.monotonic() + within_s
    while service.processes_of(job_id):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_rank_that_raises_fails_the_job_with_rank_exception_and_traceback(service: Service) -> None:
    exploding = {**LONG, "steps": 50, "optimizer": {"lr": 1e30, "clip_norm": None}}
    job = service.wait(service.submit(exploding)["id"])
    assert job["state"] == "failed"
    assert job["error"]["rank"] in (0, 1)
    assert "finite" in job["error"]["message"]
    text = service.http.get(f"/v1/jobs/{job['id']}/artifacts/{job['error']['traceback_artifact']}").text
    assert "Traceback" in text
    assert gone(service, job["id"])


def test_cancelling_a_running_job_leaves_no_process_and_frees_its_devices(service: Service) -> None:
    job_id = service.submit(LONG)["id"]
    service.wait(job_id, lambda job: job["state"] == "running" and job["progress"] is not None)
    assert service.http.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
    assert service.wait(job_id)["state"] == "cancelled"
    assert gone(service, job_id)
    follower = service.wait(service.submit({**LONG, "steps": 2, "parallel": {"dp_shard": 4}})["id"])
    assert follower["state"] == "succeeded", follower


def test_cancelling_a_queued_job_is_immediate(service: Service) -> None:
    holder = service.submit({**LONG, "parallel": {"dp_shard": 4}})["id"]
    waiting = service.submit({**LONG, "parallel": {"dp_shard": 4}})["id"]
    assert service.http.post(f"/v1/jobs/{waiting}/cancel").status_code == 202
    assert service.job(waiting)["state"] == "cancelled"
    service.http.post(f"/v1/jobs/{holder}/cancel")
    assert service.wait(holder)["state"] == "cancelled"
