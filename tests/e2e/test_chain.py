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
        "check": {"kind": "compile", "model": {"job": "train"}, "modes": ["eager", "aot_eager"], "shapes": [16]},
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
