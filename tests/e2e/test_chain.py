"""A chain as a user sends it: train, verify, check, and train by the gate of the check, without another request."""

from __future__ import annotations

from typing import Any

import pytest
from running_service import Service

pytestmark = [pytest.mark.distributed, pytest.mark.slow(30)]

MODEL = {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10}
DIGITS = {"source": "digits"}
CHAIN: dict[str, Any] = {
    "kind": "chain",
    "jobs": {
        "train": {
            "kind": "train",
            "model": MODEL,
            "data": DIGITS,
            "steps": 60,
            "optimizer": {"name": "muon", "lr": 0.02, "adamw": {"match": ["head.*"], "lr": 0.01}},
            "schedule": {"decay": "wsd", "last": 10},
            "evaluate": {"every": 2},
            "stop": {"when": {"eval_loss": {"patience": 1, "delta": 5}}},
        },
        "verify": {
            "kind": "verify",
            "model": {"job": "train"},
            "property": {"robustness": {"data": DIGITS, "eps": 0.001, "count": 2}},
        },
        "check": {"kind": "compile", "model": {"job": "train"}, "modes": ["eager", "aot_eager"]},
        "gated": {
            "kind": "train",
            "model": {"job": "train"},
            "data": DIGITS,
            "steps": 2,
            "compile": {"train": True, "gate": "check"},
            "after": ["verify"],
        },
    },
}


def test_a_chain_goes_from_a_training_to_one_by_the_gate_of_its_check(service: Service) -> None:
    over = service.wait(service.submit(CHAIN)["id"])
    assert over["state"] == "succeeded", over
    result = over["result"]
    assert list(result) == ["train", "verify", "check", "gated"]
    assert result["train"]["steps"] == 4
    assert result["train"]["ended_early"].startswith("eval_loss is no better than")
    assert result["check"]["gate"]["train"] == "aot_eager"
    assert result["gated"]["steps"] == 2


def test_a_sweep_stops_its_worse_training_early_on_all_its_ranks(service: Service) -> None:
    """Its agent judges, a renewal tells its supervisor, which tells the ranks."""
    sweep: dict[str, Any] = {"list": [{"optimizer.lr": 0.01}, {"optimizer.lr": 1e-9}]}
    sweep["stop"] = {"rule": "halving", "metric": "eval_loss", "mode": "min", "factor": 2, "first": 20}
    spec = {"kind": "train", "model": MODEL, "data": DIGITS, "steps": 10**5, "evaluate": {"every": 20, "samples": 32}}
    parent = service.submit({**spec, "parallel": {"dp_shard": 2}, "sweep": sweep})["id"]
    items = service.http.get("/v1/jobs", params={"sweep": parent}).json()["items"]
    bad, good = (job["id"] for job in items)
    over = service.wait(bad)
    assert over["state"] == "succeeded", over
    assert over["reason"] == over["result"]["ended_early"]
    assert over["reason"].startswith("stopped early by the sweep at step ")
    assert " is number 2 of 2 so far, of which the best goes on" in over["reason"]
    assert service.job(good)["state"] == "running"
    service.http.post(f"/v1/jobs/{parent}/cancel")
    assert service.wait(parent)["state"] == "cancelled"
