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
    "name": "digits in shards",
    "model": MODEL,
    "data": {"source": "digits"},
    "steps": 150,
    "optimizer": {"lr": 0.01},
    "batch": {"global": 128},
    "parallel": {"dp_shard": 2},
    "checkpoint": {"every": 75},
}


@pytest.fixture(scope="module")
def trained(service: Service) -> dict[str, Any]:
    job = service.wait(service.submit(TRAIN)["id"])
    assert job["state"] == "succeeded", job
    return job


@pytest.fixture(scope="module")
def verified(service: Service, trained: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a verification by one process."""
    return verify(service, trained)


def verify(service: Service, trained: dict[str, Any], **parallel: int) -> list[dict[str, Any]]:
    spec = {
        "kind": "verify",
        "model": {"job": trained["id"]},
        "property": {"robustness": {"data": {"source": "digits"}, "count": 8, "eps": 0.01}},
        "method": "crown",
        "parallel": parallel,
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


def test_verification_streams_a_row_per_instance(verified: list[dict[str, Any]]) -> None:
    assert [row["instance"] for row in verified] == list(range(8))
    assert [row["verdict"] for row in verified].count("verified") >= 4


@pytest.mark.slow
def test_a_verification_on_a_mesh_agrees(
    service: Service, trained: dict[str, Any], verified: list[dict[str, Any]]
) -> None:
    for alone, together in zip(verified, verify(service, trained, tp=2), strict=True):
        assert alone["verdict"] == together["verdict"]
        assert together["lower"] == pytest.approx(alone["lower"], rel=1e-4, abs=1e-4)


def test_the_compile_check_gives_a_gate_that_training_obeys(service: Service) -> None:
    check = {"kind": "compile", "model": MODEL, "modes": ["eager"], "phases": ["train"], "shapes": [64]}
    checked = service.wait(service.submit(check)["id"])
    assert checked["state"] == "succeeded", checked
    report = service.http.get(f"/v1/jobs/{checked['id']}/report").json()
    assert {rung["rung"] for rung in report["rungs"]} == {"eager"}
    assert report["gate"]["fingerprint"]
    other_mesh = {**TRAIN, "parallel": {"tp": 2}, "compile": {"train": True, "gate": checked["id"]}}
    refused = service.http.post("/v1/jobs", json=other_mesh)
    assert refused.status_code == 422
    tp = next(each for each in refused.json()["errors"] if each["path"] == "parallel.tp")
    assert (tp["got"], tp["expected"]) == (2, "1, or another compile.gate")
