"""Measures how long a compile check of a small perceptron takes through the service, phase by phase.

The first job runs on a host on which its owner has compiled nothing; the others on one that knows its compiler
and has the self-test. All rungs, training and inference; seconds from submission to the end, and of the job's
own phases until its first rung, then of rungs as they end. Two cores: ``taskset -c 0,1``.

    python benchmarks/compile_seconds.py [--checks 3] [--device cpu|cuda] [--settle 30]
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from launch import service

from service.jobs.spec.compile import CompileSpec
from service.jobs.store import Store

MODEL = {"family": "mlp", "in_features": 32, "hidden": [64, 64], "out_features": 10}


def check(store: Store, device: str) -> dict[str, float]:
    """Run one check; return its seconds by phase."""
    asked = time.time()
    spec = CompileSpec.model_validate({"model": MODEL, "device": device})
    job_id = store.jobs.submit(spec, "benchmark")[0].id
    while (job := store.jobs.get(job_id)).ended_at is None:
        time.sleep(0.02)
    if job.state != "succeeded":
        raise SystemExit(f"{job_id} {job.state}: {job.error}")
    for sentence in (job.result or {}).get("summary", ()):  # a rung that is stopped is not timed
        print(f"  {sentence}", flush=True)
    events: list[dict[str, Any]] = [item.event for item in store.events.page(job_id, after="0-0", limit=1000).items]
    spans = {each["name"]: each["end"] - each["start"] for each in events if each["type"] == "span"}
    phases = {each.name: each.seconds for each in job.phases}
    return {"all": job.ended_at.timestamp() - asked, **phases, **spans}


def table(checks: list[dict[str, float]]) -> str:
    names = list(dict.fromkeys(name for each in checks for name in each))
    head = f"| seconds | {' | '.join(f'check {number + 1}' for number in range(len(checks)))} |"
    rows = [f"| {name} | {' | '.join(f'{each.get(name, 0.0):.1f}' for each in checks)} |" for name in names]
    return "\n".join([head, "|---|" + "--:|" * len(checks), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds before the first job")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # where the host keeps an owner's compiled code
        with service(Path(folder), 1) as store:
            time.sleep(options.settle)
            found = []
            for _ in range(options.checks):
                found.append(check(store, options.device))
                print(f"{found[-1]['all']:.1f} s", flush=True)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"{where}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}, load {load:.1f}\n")
    print(table(found))


if __name__ == "__main__":
    main()
