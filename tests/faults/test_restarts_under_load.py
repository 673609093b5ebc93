"""Every part of the service is restarted, then killed, under load: no call fails, no event is lost or comes twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis as redis_py
from digits import digits_job
from local_service import address, belonging_to, give_way, part_of, parts_of, said, up
from waiting import LIMIT_S, eventually

from service.jobs.store.keyspace import LEASES
from trivet.client import Client

pytestmark = pytest.mark.distributed

ENDLESS = digits_job(256, 256, steps=10**6, checkpoint={"every": 50}, device="cpu")


class CallsInALoop:
    """A thread that calls until it is told to stop, some twenty times a second; the first failure is kept."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.failure: BaseException | None = None
        self.calls = 0
        self._call = call
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.05) and self.failure is None:
            try:
                self._call()
            except Exception as failure:
                self.failure = failure
            else:
                self.calls += 1

    def end(self) -> None:
        self._over.set()
        self._thread.join()


class Followed:
    """A thread that follows a job to its end."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(client, job_id))
        self._thread.start()

    def _run(self, client: Client, job_id: str) -> None:
        try:
            self.events += client.follow(job_id)
        except Exception as failure:
            self.failure = failure

    def end(self) -> list[dict[str, Any]]:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        assert self.failure is None
        return self.events


@contextmanager
def watching(data: Path, job_id: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "TRIVET_DATA": str(data), "TRIVET_OUTAGE_S": "300"}
    with data.with_suffix(".watched").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trivet", "watch", job_id, "--json"], env=environment, stdout=output
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def assert_whole(events: list[dict[str, Any]]) -> None:
    """No event came twice, and the metrics of every step are there."""
    ids = [tuple(map(int, event["id"].split("-"))) for event in events]
    assert ids == sorted(set(ids))
    assert "gap" not in {event["type"] for event in events}
    steps = {event["step"] for event in events if event["type"] == "metric"}
    assert steps == set(range(1, max(steps) + 1))
    assert events[-1]["state"] == "cancelled"


def restart_all(process: subprocess.Popen[bytes], data: Path) -> None:
    before = {part.pid for word in ("api", "workers", "valkey-server") for part in parts_of(process, word)}
    assert len(before) == 4
    process.send_signal(signal.SIGUSR1)
    eventually(lambda: "the restart is done" in said(data).read_text())
    assert before.isdisjoint(part.pid for part in psutil.Process(process.pid).children())


def kill_all(process: subprocess.Popen[bytes], data: Path, supervisor: psutil.Process) -> None:
    for word in ("api", "api", "workers", "valkey-server"):
        killed = part_of(process, word)
        killed.kill()
        eventually(lambda word=word, killed=killed: any(part != killed for part in parts_of(process, word)))  # type: ignore[misc]
    supervisor.kill()


def end_lease(process: subprocess.Popen[bytes], job_id: str) -> None:
    """End the lease of a job's first attempt now, as time would."""
    with redis_py.Redis.from_url(part_of(process, "workers").environ()["TRIVET_REDIS_URL"]) as broker:
        assert broker.zadd(LEASES(), {f"{job_id}:1:here": 1}, xx=True, ch=True) == 1


@pytest.mark.slow(30)
def test_no_call_fails_and_no_event_is_lost_while_every_part_is_restarted_and_killed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    settings = {"TRIVET_API_PROCESSES": "2", "TRIVET_BROKER_WAIT_S": "300", "TRIVET_LEASE_S": "30"}
    with up(data, **settings) as process:
        url, key = address(process, data), (data / "admin.key").read_text().strip()
        with Client(url, key, timeout_s=300, outage_s=300) as client:
            job = client.submit(ENDLESS)
            followed = Followed(client, job.id)

            def submit_and_cancel() -> None:
                waiting = client.submit({**ENDLESS, "after": [job.id]})
                assert client.job(waiting.id).state == "queued"
                assert client.cancel(waiting.id).state == "cancelled"

            def read() -> None:
                assert job.id in {listed.id for listed in client.jobs(state="running")} | {
                    listed.id for listed in client.jobs()
                }
                client.metrics(job.id, max_points=10)

            eventually(lambda: client.job(job.id).progress)
            with watching(data, job.id) as watch:
                loops = [CallsInALoop(submit_and_cancel), CallsInALoop(read)]
                try:
                    (supervisor,) = (
                        each for each in belonging_to(data, "workers.supervisor") if each.children(recursive=True)
                    )
                    give_way(job.id)
                    restart_all(process, data)
                    kill_all(process, data, supervisor)
                    eventually(client.is_ready)
                    end_lease(process, job.id)
                    eventually(lambda: (again := client.job(job.id)).attempt == 2 and again.state == "running")
                    reached = len(followed.events)
                    eventually(lambda: len(followed.events) > reached)
                finally:
                    for loop in loops:
                        loop.end()
                    client.cancel(job.id)
                assert [loop.failure for loop in loops] == [None, None]
                assert all(loop.calls for loop in loops)
                assert watch.wait(LIMIT_S) == 1
            assert_whole(followed.end())
            assert_whole([json.loads(line) for line in data.with_suffix(".watched").read_text().splitlines()])
