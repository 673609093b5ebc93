"""``trivet up`` and its parts, killed and hung: the next start doubles nothing, and jobs go on."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_service import address, belonging_to, part_of, said, up
from waiting import LIMIT_S, eventually

from trivet.client import Client

pytestmark = pytest.mark.slow

TRAIN: dict[str, Any] = {
    "kind": "train",
    "model": {"family": "mlp", "in_features": 64, "hidden": [16, 16], "out_features": 10},
    "data": {"source": "digits"},
    "steps": 600,
}


@contextmanager
def client_of(process: subprocess.Popen[bytes], data: Path) -> Iterator[Client]:
    with Client(address(process, data), (data / "admin.key").read_text().strip()) as client:
        yield client


def brokers(data: Path) -> list[psutil.Process]:
    return [process for name in ("valkey-server", "redis-server") for process in belonging_to(data, name)]


@pytest.mark.distributed
@pytest.mark.parametrize("next_start", ["same port", "other port", "API dead"])
def test_c2_a_start_after_kill_9_takes_over_and_the_job_ends_once(tmp_path: Path, next_start: str) -> None:
    data = tmp_path / "data"
    with up(data) as process, client_of(process, data) as client:
        url = address(process, data)
        job = client.submit(TRAIN)
        eventually(lambda: client.job(job.id).state == "running")
        old = brokers(data)
        assert len(old) == 1
        if next_start == "API dead":
            part_of(process, "api").kill()
        process.kill()
        process.wait(LIMIT_S)
    port = "0" if next_start == "other port" else url.rpartition(":")[2]
    with up(data, TRIVET_PORT=port) as process, client_of(process, data) as client:
        assert "Ended what a killed 'trivet up' left running here" in said(data).read_text()
        assert (address(process, data) == url) == (next_start != "other port")
        assert len(brokers(data)) == 1
        assert brokers(data) != old
        assert len(belonging_to(data, "workers")) == 1
        assert client.wait(job.id, timeout_s=300).state == "succeeded"
        states = [event["state"] for event in client.events(job.id, types=["state"])["items"]]
        assert states == ["queued", "starting", "running", "succeeded"]
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    eventually(lambda: belonging_to(data) == [])


@pytest.mark.waits
def test_c2_a_leftover_that_hangs_is_ended_as_well(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data) as process:
        address(process, data)
        for part in psutil.Process(process.pid).children():
            part.suspend()
        process.kill()
        process.wait(LIMIT_S)
    with up(data) as process, client_of(process, data) as client:
        assert client.is_ready()
        assert len(brokers(data)) == 1
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    assert belonging_to(data) == []


def test_c5_the_api_killed_while_the_broker_hangs_ends_nothing_else(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data) as process, client_of(process, data) as client:
        broker, worker = part_of(process, "valkey-server"), part_of(process, "workers")
        broker.suspend()
        part_of(process, "api").kill()
        # Without an answer from the broker the API cannot start: it ends by itself at least once.
        eventually(lambda: "the API ended with exit code 2" in said(data).read_text())
        broker.resume()
        eventually(client.is_ready)
        assert process.poll() is None
        assert (broker.is_running(), worker.is_running()) == (True, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    assert belonging_to(data) == []
