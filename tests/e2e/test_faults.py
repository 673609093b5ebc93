"""What goes wrong ends in the right state, says why, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from local_service import part_of
from running_service import Service
from waiting import eventually

from service.jobs.event_files import rank_file
from service.jobs.layout import DataLayout

pytestmark = pytest.mark.distributed

EVERY = 20
LONG: dict[str, Any] = {
    "kind": "train",
    "model": {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10},
    "data": {"source": "digits"},
    "steps": 1_000_000,
    "parallel": {"dp_shard": 2},
    "checkpoint": {"every": EVERY},
    "retries": 1,
}


def reached(service: Service, job_id: str, step: int, attempt: int = 1) -> dict[str, Any]:
    """The job, once this attempt of it has done so many steps."""

    def holds(job: dict[str, Any]) -> bool:
        return bool(job["attempt"] == attempt and job["state"] == "running" and job["progress"]["done"] > step)

    return service.wait(job_id, lambda job: job["progress"] is not None and holds(job))


def first_step(record: Path) -> int | None:
    """The first step that a rank of an attempt has reported, once it has."""
    lines = record.read_bytes().splitlines(keepends=True) if record.exists() else []
    events = (json.loads(line) for line in lines if line.endswith(b"\n"))
    return next((event["step"] for event in events if event["type"] == "metric"), None)


@pytest.fixture(scope="module")
def running(service: Service) -> str:
    """A job that has saved checkpoints."""
    job_id = service.submit(LONG)["id"]
    reached(service, job_id, 2 * EVERY)
    give_way(service, job_id)
    return str(job_id)


def give_way(service: Service, job_id: str) -> None:
    """Let the job's endless steps leave the processor to whatever starts beside it."""
    for process in service.processes_of(job_id):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.nice(19)


def answers(service: Service) -> bool:
    try:
        return service.http.get("/readyz").status_code == 200
    except httpx2.TransportError:
        return False


def host(service: Service) -> dict[str, Any]:
    (found,) = service.http.get("/v1/hosts").json()["items"]
    return dict(found)


def test_broker_api_and_worker_are_killed_and_a_running_job_does_not_notice(service: Service, running: str) -> None:
    """A host that was drained stays so."""
    ranks = {process.pid for process in service.processes_of(running)}
    drained = f"/v1/hosts/{host(service)['name']}"
    assert service.http.post(f"{drained}/drain").status_code == 200
    for word in ("api", "valkey-server", "workers"):
        part = part_of(service.process, word)
        part.kill()
        eventually(lambda word=word, part=part: part_of(service.process, word) != part)
        eventually(lambda: answers(service))
    seen_at = host(service)["seen_at"]
    eventually(lambda: host(service)["seen_at"] != seen_at)
    assert (host(service)["alive"], host(service)["draining"]) == (True, True)
    assert service.http.post(f"{drained}/resume").status_code == 200
    reached(service, running, service.job(running)["progress"]["done"] + EVERY)
    assert {process.pid for process in service.processes_of(running)} >= ranks
    states = service.http.get(f"/v1/jobs/{running}/events", params={"types": "state"}).json()["items"]
    assert [event["state"] for event in states] == ["queued", "starting", "running"]


def test_a_rank_is_killed_and_its_job_goes_on_from_a_checkpoint(service: Service, running: str) -> None:
    (rank,) = (each for each in service.processes_of(running) if each.environ().get("RANK") == "1")
    rank.kill()
    record = rank_file(DataLayout(service.data).job(running).attempt(2), 0)
    first = eventually(lambda: first_step(record))
    assert first > EVERY
    assert first % EVERY == 1


def test_cancelling_a_running_job_leaves_no_process_and_frees_its_devices(service: Service, running: str) -> None:
    assert service.http.post(f"/v1/jobs/{running}/cancel").status_code == 202
    assert service.wait(running)["state"] == "cancelled"
    eventually(lambda: not service.processes_of(running))
    assert host(service)["free"]["cpu"] == [0, 1, 2, 3]


def test_cancelling_a_queued_job_is_immediate(service: Service) -> None:
    holder = service.submit({**LONG, "parallel": {"dp_shard": 4}})["id"]
    waiting = service.submit({**LONG, "parallel": {"dp_shard": 4}})["id"]
    assert service.http.post(f"/v1/jobs/{waiting}/cancel").status_code == 202
    assert service.job(waiting)["state"] == "cancelled"
    service.http.post(f"/v1/jobs/{holder}/cancel")
    assert service.wait(holder)["state"] == "cancelled"


@pytest.mark.slow
def test_a_rank_that_raises_fails_the_job_with_rank_exception_and_traceback(service: Service) -> None:
    exploding = {**LONG, "steps": 50, "optimizer": {"lr": 1e30, "clip_norm": None}, "retries": 0}
    job = service.wait(service.submit(exploding)["id"])
    assert job["state"] == "failed"
    assert job["error"]["rank"] in (0, 1)
    assert "finite" in job["error"]["message"]
    text = service.http.get(f"/v1/jobs/{job['id']}/artifacts/{job['error']['traceback_artifact']}").text
    assert "Traceback" in text
    eventually(lambda: not service.processes_of(job["id"]))
