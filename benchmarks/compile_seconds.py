"""Measures how long a compile check takes through the service, phase by phase: of a small perceptron, or of a language
model that a job has trained.

The first job runs on a host on which its owner has compiled nothing; the others on one that knows its compiler
and has the self-test. All rungs, training and inference; seconds from submission to the end, and of the job's
own phases until its first rung, then of rungs as they end. Two cores: ``taskset -c 0,1``.

    python benchmarks/compile_seconds.py [--checks 3] [--device cpu|cuda] [--settle 30]
    python benchmarks/compile_seconds.py --layers 8 --width 512 --device cuda      # goal: 30 s on one H200
    python benchmarks/compile_seconds.py --layers 16 --width 2048 --device cuda    # goal: 60 s on one H200

``--stages`` prints the seconds of each run, too, for each rung in the order in which they ended. Before the first rung
of a process are its preparation and the uncompiled runs, or the wait for the process that makes them.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from launch import service

from service.jobs.records import Job
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.train import TrainSpec
from service.jobs.store import Store

MODEL = {"family": "mlp", "in_features": 32, "hidden": [64, 64], "out_features": 10}
SEQUENCE = 256


def language_model(store: Store, device: str, layers: int, width: int, steps: int) -> dict[str, Any]:
    """Train a language model for so many steps; return the fields of a check of it."""
    model = {"family": "transformer", "dim": width, "heads": 8, "layers": layers, "max_sequence": SEQUENCE}
    common = {"data": {"source": "tokens", "sequence": SEQUENCE}, "precision": {"param": "bf16"}, "device": device}
    training = {"model": model, "steps": steps, "batch": {"global": 16}, "optimizer": {"lr": 3e-4}, **common}
    job = ended(store, TrainSpec.model_validate(training))
    return {"model": {"job": job.id}, "shapes": [8], "steps": 4, **common}


def ended(store: Store, spec: TrainSpec | CompileSpec) -> Job:
    """Submit a spec; return its job once that has succeeded. While it runs, print what it does."""
    job_id = store.jobs.submit(spec, "benchmark")[0].id
    began, said = time.time(), ""
    while (job := store.jobs.get(job_id)).ended_at is None:
        time.sleep(0.02)
        doing = (job.progress and job.progress.phase) or ""
        if doing != said:
            said = doing
            print(f"  {time.time() - began:5.1f} s: {job.progress}", flush=True)
    if job.state != "succeeded":
        raise SystemExit(f"{job_id} {job.state}: {job.error}")
    return job


def check(store: Store, fields: dict[str, Any], *, stages: bool = False) -> dict[str, float]:
    """Run one check; return its seconds by phase. Print its ``stages`` if they are wanted."""
    asked = time.time()
    job = ended(store, CompileSpec.model_validate(fields))
    assert job.ended_at is not None
    job_id = job.id
    for sentence in (job.result or {}).get("summary", ()):  # a rung that is stopped is not timed
        print(f"  {sentence}", flush=True)
    events: list[dict[str, Any]] = [item.event for item in store.events.page(job_id, after="0-0", limit=1000).items]
    rungs = [each for each in events if each["type"] == "span"]
    for line in stage_lines(rungs) if stages else ():
        print(line, flush=True)
    spans = {each["name"]: each["end"] - each["start"] for each in rungs}
    phases = {each.name: each.seconds for each in job.phases}
    return {"all": job.ended_at.timestamp() - asked, **phases, **spans}


def stage_lines(rungs: list[dict[str, Any]]) -> list[str]:
    """Return a line for each stage of each rung, from when the rung began, then the sums over all processes."""
    found, sums = [], Counter[str]()
    first = min((each["start"] for each in rungs), default=0.0)
    for each in sorted(rungs, key=itemgetter("end")):
        found.append(f"{each['name']}: from {each['start'] - first:.1f} to {each['end'] - first:.1f} s")
        runs: dict[str, float] = (each.get("detail") or {}).get("runs", {})
        found += [f"    {seconds:6.2f}  {name}" for name, seconds in runs.items()]
        sums.update({name.rpartition(": ")[2]: seconds for name, seconds in runs.items()})  # type: ignore[arg-type]
    return [*found, "all processes:", *(f"    {seconds:6.2f}  {name}" for name, seconds in sums.most_common())]


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
    parser.add_argument("--layers", type=int, help="of a language model, instead of the perceptron")
    parser.add_argument("--width", type=int, default=512, help="of the language model")
    parser.add_argument("--trained", type=int, default=120, help="steps of the language model before the first check")
    parser.add_argument("--stages", action="store_true", help="print what each rung spent its time on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # where the host keeps an owner's compiled code
        with service(Path(folder), 1) as store:
            time.sleep(options.settle)
            found = []
            fields: dict[str, Any] = {"model": MODEL, "device": options.device}
            if options.layers:
                fields = language_model(store, options.device, options.layers, options.width, options.trained)
            for _ in range(options.checks):
                found.append(check(store, fields, stages=options.stages))
                print(f"{found[-1]['all']:.1f} s", flush=True)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"{where}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}, load {load:.1f}\n")
    print(table(found))


if __name__ == "__main__":
    main()
