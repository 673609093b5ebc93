"""Compile jobs on a service that has been up for a while: their ranks are forks of a process that waits for work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_service import Service, can_fork, start, stop
from waiting import eventually

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CHECK = {
    "kind": "compile",
    "model": {"family": "mlp", "in_features": 8, "hidden": [8], "out_features": 2},
    "modes": ["eager", "inductor"],
    "phases": ["inference"],
    "shapes": [4],
}


@pytest.fixture
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = start(tmp_path_factory.mktemp("warm") / "data", TRIVET_WARM_SUPERVISORS="1")
    yield running
    stop(running)


def test_every_job_may_generate_code_not_only_the_first(warm: Service) -> None:
    eventually(lambda: can_fork(warm))
    for _ in range(2):
        job = warm.wait(warm.submit(CHECK)["id"])
        assert job["state"] == "succeeded", job
        assert job["result"]["verdicts"] == {"pass": 2}, job["result"]
