"""Two GPUs: bounds on every mesh over NCCL, lost ranks, one search over both, and jobs side by side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_jobs import GPUS, ended, nothing_left_of, ranks_of
from running_service import Service

from service.jobs.spec.common import TERMINAL

pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"two ranks over NCCL need 2 GPUs; this machine has {GPUS}")
ROOT = Path(__file__).parents[2]
DIGITS = {"source": "digits"}
TRAINING = {
    "kind": "train",
    "model": {"family": "mlp", "in_features": 64, "hidden": [32, 32, 32], "out_features": 10},
    "data": DIGITS,
    "steps": 300,
    "optimizer": {"lr": 0.01},
    "batch": {"global": 128},
    "device": "cuda",
}
ENDLESS = {**TRAINING, "steps": 10_000_000, "retries": 0}
ON_TWO = [{"tp": 2}, {"dp_shard": 2}, {"pp": 2}]


@pytest.fixture(scope="module")
def classifier(service: Service) -> dict[str, Any]:
    return ended(service, TRAINING)


@pytest.mark.parametrize("parallel", ON_TWO, ids=lambda parallel: next(iter(parallel)))
@pytest.mark.parametrize("method", ["ibp", "crown", "alpha-crown", "beta-crown"])
def test_bounds_of_a_mesh_are_those_of_one_gpu(
    service: Service, classifier: dict[str, Any], method: str, parallel: dict[str, int]
) -> None:
    asked = {"robustness": {"data": DIGITS, "count": 16, "eps": 0.02}}
    spec = {"kind": "verify", "model": {"job": classifier["id"]}, "property": asked, "method": method, "device": "cuda"}
    rows = []
    for each in ({}, parallel):
        job = ended(service, {**spec, "parallel": each})
        rows.append(service.http.get(f"/v1/jobs/{job['id']}/bounds").raise_for_status().json()["items"])
    for alone, divided in zip(*rows, strict=True):
        assert alone["verdict"] == divided["verdict"]
        if method != "beta-crown":  # a search stops at the first bound that proves
            assert alone["lower"] == pytest.approx(divided["lower"], rel=1e-3, abs=1e-4)


def begun(service: Service, spec: dict[str, Any]) -> str:
    """Submit a job without an end and return its id once it has made steps."""
    job = str(service.submit(spec)["id"])
    seen = service.wait(job, lambda seen: bool((seen["progress"] or {}).get("done")) or seen["state"] in TERMINAL)
    assert seen["state"] == "running", seen["error"]
    return job


@pytest.mark.parametrize(("number", "error"), [(signal.SIGKILL, "RankDied"), (signal.SIGSTOP, "Stalled")])
def test_a_rank_that_is_lost_while_the_other_waits_in_a_collective_ends_the_job(
    service: Service, number: int, error: str
) -> None:
    """A time limit would count the start, and wait for ranks that cannot answer before it kills them."""
    job = begun(service, {**ENDLESS, "parallel": {"dp_shard": 2}, "stall_s": 15})
    ranks_of(job)[-1].send_signal(number)
    seen = service.wait(job)
    assert (seen["state"], seen["error"]["type"]) == ("failed", error), seen["error"]
    if number == signal.SIGSTOP:
        assert seen["error"]["message"].count("did not answer") == 1, "the rank that waits says where it is"
    nothing_left_of(job)


def test_one_search_on_two_gpus_decides_as_on_one() -> None:
    asked = ["--cases", "search", "--inputs", "100", "--width", "64", "--above", "0.3", "--limit", "60"]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "benchmarks/verify_mesh.py"]
    done = subprocess.run(
        [sys.executable, *ranks, *asked],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if "seed 0" in line]
    assert [row[2:4] for row in rows] == [["1", "verified"], ["2", "verified"]], done.stdout


def test_two_jobs_run_side_by_side(service: Service) -> None:
    jobs = [begun(service, ENDLESS) for _ in range(2)]
    assert [service.job(job)["state"] for job in jobs] == ["running", "running"]
    assert len({device for job in jobs for place in service.job(job)["placement"] for device in place["devices"]}) == 2
    for job in jobs:
        service.http.post(f"/v1/jobs/{job}/cancel").raise_for_status()
        service.wait(job)
        nothing_left_of(job)
