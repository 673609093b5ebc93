"""``trivet up`` and its parts, killed and hung: the next start doubles nothing, and jobs go on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from digits import digits_job
from local_service import address, belonging_to, give_way, part_of, said, up
from waiting import LIMIT_S, eventually

from trivet.client import Client

pytestmark = pytest.mark.slow

TRAIN = digits_job(16, 16, steps=600)


@contextmanager
def client_of(process: subprocess.Popen[bytes], data: Path) -> Iterator[Client]:
    with Client(address(process, data), (data / "admin.key").read_text().strip()) as client:
        yield client


def kill(process: subprocess.Popen[bytes], data: Path) -> list[psutil.Process]:
    """End ``trivet up`` alone; return the broker that it leaves."""
    old = brokers(data)
    assert len(old) == 1
    process.kill()
    process.wait(LIMIT_S)
    return old


@contextmanager
def taking_over(data: Path, old: list[psutil.Process], port: str) -> Iterator[subprocess.Popen[bytes]]:
    """The next start, which ends what the last one left."""
    with up(data, TRIVET_PORT=port) as process:
        address(process, data)
        assert "Ended what a killed 'trivet up' left running here" in said(data).read_text()
        assert len(brokers(data)) == 1
        assert brokers(data) != old
        assert len(belonging_to(data, "workers")) == 1
        yield process


def brokers(data: Path) -> list[psutil.Process]:
    return [process for name in ("valkey-server", "redis-server") for process in belonging_to(data, name)]


@pytest.mark.distributed
def test_starts_after_kill_9_take_over_and_the_job_ends_once(tmp_path: Path) -> None:
    """At the port of the killed one; and at another one, whose API was dead before."""
    data = tmp_path / "data"
    with up(data) as process, client_of(process, data) as client:
        url = address(process, data)
        job = client.submit({**TRAIN, "steps": 10**6})
        eventually(lambda: client.job(job.id).state == "running")
        give_way(job.id)
        old = kill(process, data)
    with taking_over(data, old, url.rpartition(":")[2]) as process, client_of(process, data) as client:
        assert address(process, data) == url
        assert client.job(job.id).attempt == 1
        short = client.submit(TRAIN)
        part_of(process, "api").kill()
        old = kill(process, data)
    with taking_over(data, old, "0") as process, client_of(process, data) as client:
        assert address(process, data) != url
        client.cancel(job.id)
        for ended, ends in ((job, ["cancelling", "cancelled"]), (short, ["succeeded"])):
            assert client.wait(ended.id, timeout_s=300).state == ends[-1]
            states = [event["state"] for event in client.events(ended.id, types=["state"])["items"]]
            assert states == ["queued", "starting", "running", *ends]
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    eventually(lambda: belonging_to(data) == [])


@pytest.mark.waits
def test_the_api_killed_while_the_broker_hangs_ends_nothing_else_and_leftovers_that_hang_are_ended(
    tmp_path: Path,
) -> None:
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
        for part in psutil.Process(process.pid).children():
            part.suspend()
        old = kill(process, data)
    with taking_over(data, old, "0") as process, client_of(process, data) as client:
        assert client.is_ready()
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    assert belonging_to(data) == []
