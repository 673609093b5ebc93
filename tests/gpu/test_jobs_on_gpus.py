"""Jobs on GPUs through the service: layouts, schedules, bounds, compiled FSDP2, a device for two, stopped ranks."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from typing import Any

import pytest
from digits import digits_job
from gpu_jobs import GPUS, ended, losses, nothing_left_of, signal_ranks
from running_service import LIMIT_S, Service

from service.schedules import GENERATORS

SMALL = digits_job(32, 32, steps=300, optimizer={"lr": 0.01}, batch={"global": 128}, device="cuda")
ENDLESS = {**SMALL, "steps": 10_000_000, "retries": 0}


@pytest.fixture(scope="module")
def classifier(service: Service) -> dict[str, Any]:
    convnet = {"family": "convnet", "height": 8, "width": 8, "channels": [8, 16], "hidden": [32], "out_features": 10}
    return ended(service, {**SMALL, "model": convnet})


@pytest.mark.parametrize("family", ["mlp", "transformer"])
def test_compiled_fsdp_equals_eager(service: Service, family: str) -> None:
    ranks = min(2, GPUS)
    models = {
        "mlp": {"model": SMALL["model"], "data": {"source": "digits"}},
        "transformer": {
            "model": {"family": "transformer", "dim": 64, "layers": 2, "max_sequence": 32},
            "data": {"source": "tokens", "sequence": 32},
        },
    }
    spec = {"kind": "compile", **models[family], "shapes": [8], "steps": 10, "parallel": {"dp_shard": ranks}}
    job = ended(service, {**spec, "modes": ["eager", "aot_eager", "aot_eager_decomp_partition", "inductor"]})
    assert job["result"]["verdicts"] == {"pass": 8}, job["result"]["summary"]


@pytest.mark.parametrize("method", ["ibp", "crown", "alpha-crown", "beta-crown"])
def test_bounds_on_a_gpu_are_those_of_a_cpu(service: Service, classifier: dict[str, Any], method: str) -> None:
    asked = {"robustness": {"data": {"source": "digits"}, "count": 16, "eps": 0.02}}
    spec = {"kind": "verify", "model": {"job": classifier["id"]}, "property": asked, "method": method}
    rows = []
    for device in ("cuda", "cpu"):
        job = ended(service, {**spec, "device": device})
        rows.append(service.http.get(f"/v1/jobs/{job['id']}/bounds").raise_for_status().json()["items"])
    for here, there in zip(*rows, strict=True):
        assert {here["verdict"], there["verdict"]} != {"verified", "falsified"}
        if method in {"ibp", "crown"}:  # the others stop where their time or their steps end
            assert here["lower"] == pytest.approx(there["lower"], rel=1e-5, abs=1e-5)  # TF32: 1e-3
    assert any(row["verdict"] == "verified" for row in rows[0]) or method == "ibp"


def test_two_jobs_for_the_same_device_run_one_after_the_other(service: Service) -> None:
    whole = {**ENDLESS, "parallel": {"dp_shard": GPUS}}
    first, second = service.submit(whole)["id"], service.submit({**SMALL, "parallel": {"dp_shard": GPUS}})["id"]
    service.wait(first, lambda job: bool((job["progress"] or {}).get("done")))
    assert service.job(second)["state"] == "queued"
    service.http.post(f"/v1/jobs/{first}/cancel").raise_for_status()
    assert service.wait(second)["state"] == "succeeded"
    assert service.job(first)["state"] == "cancelled"
    nothing_left_of(first)


def test_a_rank_that_is_stopped_is_ended_by_its_time_limit_and_leaves_the_device(service: Service) -> None:
    job = service.submit({**ENDLESS, "timeout_s": 20})["id"]
    service.wait(job, lambda seen: bool((seen["progress"] or {}).get("done")))
    signal_ranks(job, signal.SIGSTOP)
    seen = service.wait(job)
    assert (seen["state"], seen["error"]["type"]) == ("failed", "TimeoutExceeded")
    nothing_left_of(job)
    assert service.wait(service.submit(SMALL)["id"])["state"] == "succeeded"


def test_nccl_says_that_it_wants_a_device_for_each_rank() -> None:
    """Why layouts of several ranks are skipped on one GPU."""
    program = (
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "dist.all_reduce(torch.ones(1, device='cuda:0'))\n"
        "torch.cuda.synchronize()\n"
    )
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = subprocess.run(
        [*run, sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode != 0
    assert "Duplicate GPU detected" in done.stdout + done.stderr


LAYOUTS = [
    {"dp_shard": 2},
    {"tp": 2},
    *({"pp": 2, "schedule": name} for name in GENERATORS),
    {"dp_replicate": 2, "tp": 2},
    {"pp": 2, "tp": 2, "schedule": "1f1b"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=json.dumps)
def test_every_layout_learns_what_one_device_learns(service: Service, layout: dict[str, Any]) -> None:
    parallel = {name: degree for name, degree in layout.items() if name != "schedule"}
    ranks = math.prod(parallel.values())
    if ranks > GPUS:
        pytest.skip(f"{ranks} ranks over NCCL need {ranks} GPUs; this machine has {GPUS}")
    model = {"family": "transformer", "dim": 64, "layers": 4, "max_sequence": 32}
    spec = {"kind": "train", "model": model, "data": {"source": "tokens", "sequence": 32}, "steps": 20}
    spec |= {"batch": {"global": 16}, "device": "cuda", "optimizer": {"lr": 1e-3}}
    pipeline = {"pipeline": {"schedule": layout["schedule"]}} if "schedule" in layout else {}
    alone, divided = (ended(service, each)["id"] for each in (spec, {**spec, "parallel": parallel, **pipeline}))
    assert losses(service, divided) == pytest.approx(losses(service, alone), rel=1e-3)
