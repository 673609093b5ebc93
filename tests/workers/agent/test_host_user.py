"""A worker that knows nothing but its host's user of the broker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import RankServers
from network_broker import PASSWORDS, network_broker
from worker_fleet import HOST, Fleet, Worker, train_spec

from service.jobs.files import DataLayout
from service.jobs.records import AttemptRef
from service.jobs.store import Store, StoreLimits

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_a_job_runs_on_a_host_that_has_its_own_user(
    tmp_path: Path, data: DataLayout, limits: StoreLimits, rank_servers: RankServers
) -> None:
    """Placed, sent through Celery, run and reported; the broker has refused nothing of it."""
    secret = tmp_path / "password"
    secret.write_text(PASSWORDS["host"] + "\n")
    with network_broker(tmp_path) as broker:
        store = Store.connect(broker.url("api"), data, limits)
        fleet = Fleet(store, data, f"redis://127.0.0.1:{broker.port}/0", limits, rank_servers)
        worker = Worker(
            fleet, tmp_path / "agent.log", TRIVET_BROKER_USER="host", TRIVET_BROKER_PASSWORD_FILE=str(secret)
        )
        try:
            job, _ = store.jobs.submit(train_spec("succeed"), "tester")
            ended = fleet.ended(AttemptRef(job.id, 1, HOST))
            assert ended.state == "succeeded", worker.said()
            assert worker.end() == 0, worker.said()
            assert PASSWORDS["host"] not in worker.said()
        finally:
            worker.process.kill()
            fleet.close()
        log: Any = broker.admin.execute_command("ACL", "LOG")
        assert log == []


@pytest.mark.slow
def test_a_worker_whose_password_is_wrong_says_so(tmp_path: Path, data: DataLayout) -> None:
    with network_broker(tmp_path) as broker:
        variables = {
            "TRIVET_REDIS_URL": f"redis://127.0.0.1:{broker.port}/0", "TRIVET_DATA": str(data.root),
            "TRIVET_BROKER_USER": "host", "TRIVET_BROKER_PASSWORD": "no",
        }  # fmt: skip
        ran = subprocess.run(
            [sys.executable, "-m", "workers"],
            cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert ran.returncode == 2, ran.stderr
    assert "rejects this user or this password" in ran.stderr
    assert "Traceback" not in ran.stderr
