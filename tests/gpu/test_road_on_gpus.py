"""The road of a language model on a GPU, through the service as a user goes it: trained, bounded, checked, compiled,
killed, resumed. Nothing is left on the device at any end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest
from gpu_jobs import GPUS, ended, losses, nothing_left_of, signal_ranks
from running_service import LIMIT_S, Service

LAYERS, WIDTH, SEQUENCE = 8, 512, 256
COMMON = {
    "data": {"source": "tokens", "sequence": SEQUENCE},
    "precision": {"param": "bf16"},
    "device": "cuda",
}
LANGUAGE = {
    "kind": "train",
    "model": {"family": "transformer", "dim": WIDTH, "heads": 8, "layers": LAYERS, "max_sequence": SEQUENCE},
    "steps": 120,
    "batch": {"global": 8},
    "optimizer": {"lr": 3e-4},
    "checkpoint": {"every": 40},
    **COMMON,
}


@pytest.fixture(scope="module")
def trained(service: Service) -> dict[str, Any]:
    return ended(service, LANGUAGE)


def test_the_demo_trains_verifies_and_checks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trivet", "demo"], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "certified accuracy" in " ".join(done.stdout.split())


def test_a_language_model_learns(service: Service, trained: dict[str, Any]) -> None:
    found = losses(service, trained["id"])
    assert found[-1] < 0.8 * found[0]


def test_a_language_model_is_bounded(service: Service, trained: dict[str, Any]) -> None:
    asked = {"robustness": {"data": COMMON["data"] | {"sequence": 16}, "count": 2, "eps": 1e-6}}
    spec = {"kind": "verify", "model": {"job": trained["id"]}, "property": asked, "method": "ibp", "device": "cuda"}
    job = ended(service, spec)
    rows = service.http.get(f"/v1/jobs/{job['id']}/bounds").raise_for_status().json()["items"]
    assert len(rows) == 2


def test_the_check_of_a_language_model_ends_and_its_gate_compiles_a_training_that_is_killed_and_resumes(
    service: Service, trained: dict[str, Any]
) -> None:
    checked = ended(service, {"kind": "compile", "model": {"job": trained["id"]}, "shapes": [8], "steps": 4, **COMMON})
    assert checked["result"]["verdicts"] == {"pass": 10}, checked["result"]["summary"]
    train_by_gate_and_kill(service, checked["id"], LANGUAGE, losses(service, trained["id"]))


@pytest.mark.skipif(GPUS < 2, reason=f"two ranks over NCCL need 2 GPUs; this machine has {GPUS}")
@pytest.mark.parametrize("layout", ["dp_shard", "tp", "pp"])
def test_the_road_of_a_language_model_on_two_gpus(service: Service, trained: dict[str, Any], layout: str) -> None:
    divided = {"parallel": {layout: 2}}
    climbed = {
        "shapes": [{"dp_shard": 4, "tp": 8, "pp": 2}[layout]],
        "steps": 3,
        "modes": ["eager", "inductor"],
        "phases": ["train"],
    }
    checked = ended(service, {"kind": "compile", "model": {"job": trained["id"]}, **climbed, **divided, **COMMON})
    assert checked["result"]["verdicts"] == {"pass": 2}, checked["result"]["summary"]
    train_by_gate_and_kill(service, checked["id"], LANGUAGE | divided, losses(service, trained["id"]))


def test_one_of_two_processes_makes_the_uncompiled_runs_of_a_large_model(service: Service) -> None:
    """Each makes the states, of more than 256 MiB, itself."""
    model = {"family": "transformer", "dim": 1024, "heads": 8, "layers": 8, "max_sequence": SEQUENCE}
    spec = {"kind": "compile", "model": model, "shapes": [4], "modes": ["eager", "aot_eager"], "phases": ["train"]}
    checked = ended(service, {**spec, **COMMON})
    assert checked["result"]["verdicts"] == {"pass": 2}, checked["result"]["summary"]
    spans = service.http.get(f"/v1/jobs/{checked['id']}/events", params={"types": "span"}).json()["items"]
    runs = [set(span["detail"]["runs"]) for span in spans if span["name"].startswith("train/")]
    assert sorted("train: float64" in each for each in runs) == [False, True]
    assert sorted("train: each shape once, uncompiled" in each for each in runs) == [False, True]


def train_by_gate_and_kill(service: Service, gate: str, spec: dict[str, Any], alone: list[float]) -> None:
    """A training that the gate compiles loses its ranks, resumes, and ends where one without either ends."""
    job = service.submit(
        {**spec, "compile": {"train": True, "inference": "parallel" not in spec, "gate": gate}, "retries": 1}
    )
    service.wait(job["id"], lambda seen: (seen["progress"] or {}).get("done", 0) > 50 or seen["ended_at"])
    signal_ranks(job["id"], signal.SIGKILL)
    resumed = service.wait(job["id"])
    assert (resumed["state"], resumed["attempt"]) == ("succeeded", 2), resumed["error"]
    assert losses(service, job["id"])[-1] == pytest.approx(alone[-1], rel=0.02)
    nothing_left_of(job["id"])
