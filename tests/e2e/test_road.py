"""One service: a job of each kind, linked, from REST to result; then its parts are killed, and a rank; one raises."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from digits import digits_job
from local_service import belonging_to, give_way, part_of, processes_of
from running_service import LIMIT_S, Service
from safetensors.numpy import load as load_safetensors
from waiting import eventually
from webhook_receiver import Receiver, receiving

from service.jobs.events import rank_file
from service.jobs.files import DataLayout
from trivet.webhooks import verify as verify_event

pytestmark = pytest.mark.distributed

TRAIN = {
    **digits_job(32, 32, name="digits in shards", steps=150, optimizer={"lr": 0.01}, batch={"global": 128}),
    "parallel": {"dp_shard": 2},
    "checkpoint": {"every": 75},
    "evaluate": {"every": 75},
}
EVERY = 20
LONG = digits_job(steps=1_000_000, parallel={"dp_shard": 2}, checkpoint={"every": EVERY}, retries=1)


EXPLODING = digits_job(steps=50, optimizer={"lr": 1e30, "clip_norm": None}, parallel={"dp_shard": 2})


@pytest.fixture(scope="module", autouse=True)
def check(service: Service) -> str:
    """A compile check, which goes on beside the other jobs, since it proves all detectors."""
    spec = {"kind": "compile", "model": TRAIN["model"], "modes": ["eager"], "phases": ["train"], "shapes": [64]}
    return str(service.submit(spec)["id"])


def test_a_job_is_taken_at_once(service: Service, check: str) -> None:
    assert service.job(check)["state"] in ("queued", "starting", "running")
    assert host(service)["alive"]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """Who is told how the jobs go, as their specs ask."""
    with receiving() as running:
        yield running


@pytest.fixture(scope="module")
def trained(service: Service, receiver: Receiver) -> dict[str, Any]:
    notify = {"webhook": receiver.url, "when": {"eval_accuracy": "> 0.2", "loss": "< 0"}}
    job = service.wait(service.submit({**TRAIN, "notify": notify})["id"])
    assert job["state"] == "succeeded", job
    return job


@pytest.fixture(scope="module")
def verified(service: Service, trained: dict[str, Any], receiver: Receiver) -> list[dict[str, Any]]:
    """The rows of a verification by one process."""
    return verify(service, trained, notify={"webhook": receiver.url, "on": [], "when": {"instances": ">= 8"}})


def verify(service: Service, trained: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    spec = {
        "kind": "verify",
        "model": {"job": trained["id"]},
        "property": {"robustness": {"data": {"source": "digits"}, "count": 8, "eps": 0.01}},
        "method": "crown",
        **fields,
    }
    job = service.wait(service.submit(spec)["id"])
    assert job["state"] == "succeeded", job
    rows: list[dict[str, Any]] = service.http.get(f"/v1/jobs/{job['id']}/bounds").json()["items"]
    for verdict, count in job["result"]["verdicts"].items():
        assert [row["verdict"] for row in rows].count(verdict) == count
    return rows


def test_training_learns_in_shards(service: Service, trained: dict[str, Any]) -> None:
    assert trained["result"]["eval_accuracy"] > 0.85
    assert trained["attempt"] == 1
    assert [len(share["devices"]) for share in trained["placement"]] == [2]
    names = {"names": "loss,forwards_per_micro_batch/stage 0,outliving_results"}
    loss, forwards, outliving = (
        service.http.get(f"/v1/jobs/{trained['id']}/metrics", params=names).json()["series"][name]
        for name in names["names"].split(",")
    )
    assert loss["step"][-1] == 150
    assert loss["value"][-1] < loss["value"][0] / 2
    assert (forwards["step"], forwards["value"], outliving["value"]) == ([1, 101], [1, 1], [0, 0])


def test_the_weights_can_be_fetched_and_match_their_hash(service: Service, trained: dict[str, Any]) -> None:
    listing = service.http.get(f"/v1/jobs/{trained['id']}/artifacts").json()
    artifacts = listing["items"] if isinstance(listing, dict) else listing
    weights = next(artifact for artifact in artifacts if artifact["name"] == "model.safetensors")
    body = service.http.get(f"/v1/jobs/{trained['id']}/artifacts/model.safetensors").content
    assert len(body) == weights["bytes"]
    assert hashlib.sha256(body).hexdigest() == weights["sha256"]
    shapes = sorted(tensor.shape for tensor in load_safetensors(body).values())
    assert shapes == [(10,), (10, 32), (32,), (32,), (32, 32), (32, 64)]


def test_verification_streams_a_row_per_instance(verified: list[dict[str, Any]]) -> None:
    assert [row["instance"] for row in verified] == list(range(8))
    assert [row["verdict"] for row in verified].count("verified") >= 4


def test_jobs_tell_of_metrics_of_results_and_of_their_ends(
    service: Service, trained: dict[str, Any], verified: list[dict[str, Any]], receiver: Receiver
) -> None:
    eventually(lambda: len(receiver.taken) >= 3)
    secret = service.http.get("/v1/webhooks/secret").json()["secret"]
    told = {(each.data.kind, each.type): each.data for each in (verify_event(secret, *it) for it in receiver.taken)}
    assert set(told) == {("train", "job.metric"), ("train", "job.succeeded"), ("verify", "job.metric")}
    assert told["train", "job.succeeded"].job == trained["id"]
    accuracy, instances = told["train", "job.metric"].metric, told["verify", "job.metric"].metric
    assert accuracy is not None
    assert (accuracy.name, accuracy.value > 0.2, accuracy.step) == ("eval_accuracy", True, 75)
    assert instances is not None
    assert (instances.name, instances.value, instances.step) == ("instances", len(verified), None)


@pytest.mark.slow
def test_a_verification_on_a_mesh_agrees(
    service: Service, trained: dict[str, Any], verified: list[dict[str, Any]]
) -> None:
    for alone, together in zip(verified, verify(service, trained, parallel={"tp": 2}), strict=True):
        assert alone["verdict"] == together["verdict"]
        assert together["lower"] == pytest.approx(alone["lower"], rel=1e-4, abs=1e-4)


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
    give_way(job_id)
    return str(job_id)


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
    ranks = {process.pid for process in processes_of(running)}
    drained = f"/v1/hosts/{host(service)['name']}"
    assert service.http.post(f"{drained}/drain").status_code == 200
    parts = {word: part_of(service.process, word) for word in ("api", "valkey-server", "workers")}
    for part in parts.values():
        part.kill()
    for word, part in parts.items():
        eventually(lambda word=word, part=part: part_of(service.process, word) != part)
    eventually(lambda: answers(service))
    seen_at = host(service)["seen_at"]
    eventually(lambda: host(service)["seen_at"] != seen_at)
    assert (host(service)["alive"], host(service)["draining"]) == (True, True)
    assert service.http.post(f"{drained}/resume").status_code == 200
    reached(service, running, service.job(running)["progress"]["done"] + EVERY)
    assert {process.pid for process in processes_of(running)} >= ranks
    states = service.http.get(f"/v1/jobs/{running}/events", params={"types": "state"}).json()["items"]
    assert [event["state"] for event in states] == ["queued", "starting", "running"]


def test_the_compile_check_gives_a_gate_that_training_obeys(service: Service, check: str) -> None:
    checked = service.wait(check)
    assert checked["state"] == "succeeded", checked
    report = service.http.get(f"/v1/jobs/{checked['id']}/report").json()
    assert {proof["holds"] for proof in report["selftest"]} == {True}
    assert {rung["rung"] for rung in report["rungs"]} == {"eager"}
    assert report["gate"]["fingerprint"]
    other_mesh = {**TRAIN, "parallel": {"tp": 2}, "compile": {"train": True, "gate": checked["id"]}}
    refused = service.http.post("/v1/jobs", json=other_mesh)
    assert refused.status_code == 422
    tp = next(each for each in refused.json()["errors"] if each["path"] == "parallel.tp")
    assert (tp["got"], tp["expected"]) == (2, "1, or another compile.gate")


def test_a_rank_is_killed_and_its_job_goes_on_from_a_checkpoint(service: Service, running: str) -> None:
    (rank,) = (each for each in processes_of(running) if each.environ().get("RANK") == "1")
    rank.kill()
    record = rank_file(DataLayout(service.data).job(running).attempt(2), 0)
    first = eventually(lambda: first_step(record))
    assert first > EVERY
    assert first % EVERY == 1


def test_a_job_that_waits_is_cancelled_at_once(service: Service, running: str) -> None:
    waiting = service.submit({**LONG, "parallel": {"dp_shard": 4}})["id"]
    assert service.http.post(f"/v1/jobs/{waiting}/cancel").status_code == 202
    assert service.job(waiting)["state"] == "cancelled"
    assert service.job(running)["state"] in ("starting", "running")


def test_cancelling_a_running_job_leaves_no_process_and_frees_its_devices(service: Service, running: str) -> None:
    assert service.http.post(f"/v1/jobs/{running}/cancel").status_code == 202
    assert service.wait(running)["state"] == "cancelled"
    eventually(lambda: not processes_of(running))
    assert host(service)["free"]["cpu"] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_rank_that_raises_fails_the_job_with_rank_exception_and_traceback(service: Service) -> None:
    job = service.wait(service.submit(EXPLODING)["id"])
    assert job["state"] == "failed"
    assert job["error"]["rank"] in (0, 1)
    assert "finite" in job["error"]["message"]
    text = service.http.get(f"/v1/jobs/{job['id']}/artifacts/{job['error']['traceback_artifact']}").text
    assert "Traceback" in text
    eventually(lambda: not processes_of(job["id"]))


def test_it_goes_down_whole(service: Service) -> None:
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(LIMIT_S) == 0
    assert belonging_to(service.data) == []
