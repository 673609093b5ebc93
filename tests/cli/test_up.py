"""``trivet up`` as a user runs it: it comes up whole, and goes down whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis as redis_py
from cli_world import TRAIN
from local_service import address, belonging_to, give_way, namesakes, part_of, parts_of, said, up
from waiting import LIMIT_S, eventually

from trivet.client import Client


@pytest.mark.slow
@pytest.mark.parametrize("part", ["api", "worker"])
def test_a_part_runs_no_modules_of_the_folder_it_is_started_in(
    part: str, redis: redis_py.Redis, broker: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    settings = {
        "TRIVET_DATA": str(data),
        "TRIVET_PORT": "0",
        "TRIVET_REDIS_URL": broker,
        "TRIVET_WARM_SUPERVISORS": "0",
    }
    with said(data).open("wb") as output:
        process = subprocess.Popen(
            # The installed command does not look there either; that is what -P stands for.
            [sys.executable, "-P", "-m", "trivet", part],
            env={**os.environ, **settings},
            stdout=output,
            stderr=output,
            cwd=namesakes(data, "service", "trivet"),
        )
    try:

        def running() -> bool:
            assert process.poll() is None, said(data).read_text()
            return "serving http" in said(data).read_text() if part == "api" else bool(redis.keys("*host*"))

        eventually(running)
    finally:
        process.terminate()
        process.wait(LIMIT_S)
    assert "not the service" not in said(data).read_text()


@pytest.mark.slow
def test_it_comes_up_whole_keeps_its_parts_alive_and_goes_down_whole(tmp_path: Path) -> None:
    """However often a part dies. By Ctrl-C; the other tests here end it by SIGTERM."""
    data = tmp_path / "data"
    with up(data) as process:
        url = address(process, data)
        secret = (data / "admin.key").read_text().strip()
        assert secret in said(data).read_text()
        with Client(url, secret) as client:
            assert client.is_ready()
            assert [(host.name, host.alive, host.cpu_slots) for host in client.hosts()] == [("here", True, 2)]
            assert httpx2.get(f"{url}/login", timeout=300).status_code == 200
            for word, name in (("valkey-server", "broker"), ("api", "API"), ("workers", "worker")):
                part_of(process, word).kill()
                line = f"the {name} was ended by SIGKILL and is restarted;"
                eventually(lambda line=line: line in said(data).read_text())  # type: ignore[misc]
            eventually(client.is_ready)
            eventually(lambda: any(host.alive for host in client.hosts()))
            killed = part_of(process, "workers")
            killed.kill()
            eventually(lambda: said(data).read_text().count("the worker was ended by SIGKILL and is restarted") == 2)
            eventually(lambda: any(part != killed for part in parts_of(process, "workers")))
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
    assert belonging_to(data) == []


@pytest.mark.slow
def test_parts_that_are_killed_during_the_start_are_started_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data) as process:
        eventually(lambda: parts_of(process, "workers"))
        for word in ("valkey-server", "api", "workers"):
            part_of(process, word).kill()
        with Client(address(process, data), (data / "admin.key").read_text().strip()) as client:
            eventually(client.is_ready)
            eventually(lambda: any(host.alive for host in client.hosts()))
        for name in ("broker", "API", "worker"):
            assert f"the {name} was ended by SIGKILL and is restarted" in said(data).read_text()
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    assert belonging_to(data) == []


@pytest.mark.slow
@pytest.mark.distributed
def test_jobs_that_run_when_it_stops_resume_when_it_starts(tmp_path: Path) -> None:
    data = tmp_path / "data"
    long: dict[str, Any] = {**TRAIN, "steps": 10**6, "checkpoint": {"every": 20}}
    with up(data) as process:
        with Client(address(process, data), (data / "admin.key").read_text().strip()) as client:
            job = client.submit(long)
            verify = {"kind": "verify", "model": {"job": job.id}, "property": {"robustness": {
                "data": {"source": "digits"}, "eps": 0.01}}}  # fmt: skip
            dependent = client.submit(verify)
            reached = next(e["step"] for e in client.follow(job.id, types=["metric"]) if e.get("step", 0) > 20)
            give_way(job.id)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    eventually(lambda: belonging_to(data) == [])
    with up(data) as process, Client(address(process, data), (data / "admin.key").read_text().strip()) as client:
        assert "Admin key" not in said(data).read_text()
        assert client.job(dependent.id).state == "queued"
        passed = [event["state"] for event in client.events(job.id, types=["state"])["items"]]
        assert "failed" not in passed
        eventually(lambda: client.job(job.id).state == "running")
        after = client.events(job.id, limit=1000)["next_after"]
        step = next(e["step"] for e in client.follow(job.id, after=after, types=["metric"]) if "step" in e)
        assert step > reached - 20
        assert client.job(job.id).attempt == 2
        client.cancel(job.id)
        assert client.wait(job.id, timeout_s=300).state == "cancelled"
    eventually(lambda: belonging_to(data) == [])


@pytest.mark.slow
@pytest.mark.distributed
def test_a_second_one_is_refused_and_leaves_the_first_and_its_jobs_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data) as process:
        url = address(process, data)
        first = said(data).read_text()
        with Client(url, (data / "admin.key").read_text().strip()) as client:
            job = client.submit({**TRAIN, "steps": 10**6})
            eventually(lambda: client.job(job.id).state == "running")
            give_way(job.id)
            for port in (url.rpartition(":")[2], "0"):
                with up(data, TRIVET_PORT=port) as second:
                    assert second.wait(LIMIT_S) == 2
                assert "another 'trivet up' already runs" in said(data).read_text()
            with up(tmp_path / "other", TRIVET_PORT=url.rpartition(":")[2]) as third:
                assert third.wait(LIMIT_S) == 2
            assert "TRIVET_PORT" in said(tmp_path / "other").read_text()
            assert not (tmp_path / "other" / "broker").exists()
            assert client.is_ready()
            began = client.events(job.id, limit=1000)["next_after"]
            assert next(e for e in client.follow(job.id, after=began, types=["metric"]))
            assert (client.job(job.id).state, client.job(job.id).attempt) == ("running", 1)
        said(data).write_text(first)
    eventually(lambda: belonging_to(data) == [])
