"""What goes wrong in a job of the whole service ends in the right state, says why, and leaves no process behind."""

from __future__ import annotations

from typing import Any

import pytest
from running_service import Service
from waiting import eventually

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EXPLODING: dict[str, Any] = {
    "kind": "train",
    "model": {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10},
    "data": {"source": "digits"},
    "steps": 50,
    "optimizer": {"lr": 1e30, "clip_norm": None},
    "parallel": {"dp_shard": 2},
}


def test_a_rank_that_raises_fails_the_job_with_rank_exception_and_traceback(service: Service) -> None:
    job = service.wait(service.submit(EXPLODING)["id"])
    assert job["state"] == "failed"
    assert job["error"]["rank"] in (0, 1)
    assert "finite" in job["error"]["message"]
    text = service.http.get(f"/v1/jobs/{job['id']}/artifacts/{job['error']['traceback_artifact']}").text
    assert "Traceback" in text
    eventually(lambda: not service.processes_of(job["id"]))
