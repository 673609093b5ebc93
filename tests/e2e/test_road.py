"""One job of each kind, linked, from REST to result."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from running_service import Service
from safetensors.numpy import load as load_safetensors

pytestmark = pytest.mark.distributed

MODEL = {"family": "mlp", "in_features": 64, "hidden": [32, 32], "out_features": 10}
TRAIN = {
    "kind": "train",
    "name": "digits on a sharded mesh",
    "model": MODEL,
    "data": {"source": "digits"},
    "steps": 150,
    "optimizer": {"lr": 0.01},
    "batch": {"global": 128},
    "parallel": {"dp_shard": 2, "tp": 2},
    "checkpoint": {"every": 75},
}


@pytest.fixture(scope="module")
def trained(service: Service) -> dict[str, Any]:
    job = service.wait(service.submit(TRAIN)["id"])
    assert job["state"] == "succeeded", job
    return job


def test_training_learns_on_a_sharded_mesh(service: Service, trained: dict[str, Any]) -> None:
    assert trained["result"]["eval_accuracy"] > 0.85
    assert trained["attempt"] == 1
    assert [len(share["devices"]) for share in trained["placement"]] == [4]
    series = service.http.get(f"/v1/jobs/{trained['id']}/metrics", params={"names": "loss"}).json()["series"]["loss"]
    assert series["step"][-1] == 150
    assert series["value"][-1] < series["value"][0] / 2


def test_the_weights_can_be_fetched_and_match_their_hash(service: Service, trained: dict[str, Any]) -> None:
    listing = service.http.get(f"/v1/jobs/{trained['id']}/artifacts").json()
    artifacts = listing["items"] if isinstance(listing, dict) else listing
    weights = next(artifact for artifact in artifacts if artifact["name"] == "model.safetensors")
    body = service.http.get(f"/v1/jobs/{trained['id']}/artifacts/model.safetensors").content
    assert len(body) == weights["bytes"]
    assert hashlib.sha256(body).hexdigest() == weights["sha256"]
    shapes = sorted(tensor.shape for tensor in load_safetensors(body).values())
    assert shapes == [(10,), (10, 32), (32,), (32,), (32, 32), (32, 64)]


def test_verification_streams_a_row_per_instance_and_meshes_agree(service: Service, trained: dict[str, Any]) -> None:
    spec = {
        "kind": "verify",
        "model": {"job": trained["id"]},
        "property": {"robustness": {"data": {"source": "digits"}, "count": 8, "eps": 0.01}},
        "method": "crown",
    }
    single = service.submit(spec)["id"]
    sharded = service.submit({**spec, "parallel": {"tp": 2}})["id"]
    rows = []
    for job_id in (single, sharded):
        job = service.wait(job_id)
        assert job["state"] == "succeeded", job
        assert sum(job["result"]["verdicts"].values()) == 8
        assert job["result"]["verdicts"]["verified"] >= 4
        rows.append(service.http.get(f"/v1/jobs/{job_id}/bounds").json()["items"])
    for alone, together in zip(*rows, strict=True):
        assert alone["verdict"] == together["verdict"]
        assert together["lower"] == pytest.approx(alone["lower"], rel=1e-4, abs=1e-4)


def test_the_compile_check_gives_a_gate_that_training_obeys(service: Service, trained: dict[str, Any]) -> None:
    check = {"kind": "compile", "model": MODEL, "modes": ["eager", "aot_eager"], "phases": ["train"], "shapes": [64]}
    checked = service.wait(service.submit(check)["id"])
    assert checked["state"] == "succeeded", checked
    report = service.http.get(f"/v1/jobs/{checked['id']}/report").json()
    assert {rung["rung"] for rung in report["rungs"]} == {"eager", "aot_eager"}
    assert report["gate"]["fingerprint"]
    other_mesh = {**TRAIN, "steps": 2, "compile": {"train": True, "gate": checked["id"]}}
    refused = service.http.post("/v1/jobs", json=other_mesh)
    assert refused.status_code == 422
    tp = next(each for each in refused.json()["errors"] if each["path"] == "parallel.tp")
    assert (tp["got"], tp["expected"]) == (2, "1, or another compile.gate")
