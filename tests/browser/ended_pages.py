"""Pages of every kind with something on them, where nothing changes any more."""

from __future__ import annotations

import json

from compile_report import REPORT
from fleet import Fleet, compile_spec, submit_sweep, train_spec, verify_spec

from service.jobs.records import JobError
from service.jobs.store import JobFilter


def ended_pages(fleet: Fleet) -> dict[str, str]:
    """The address of a page of every kind, by name; of jobs, ended ones."""
    train = fleet.run(train_spec(labels={"team": "vision"}, evaluate={"every": 10}))
    for step in range(1, 101):
        values = {
            "loss": 1 / step,
            "lr": 0.001,
            "grad_norm": 1.0,
            "step_ms": 3.0,
            "samples_per_s": 100.0,
            "tflops": 0.1,
        }
        train.metric(step, of=100, **values, **({"eval_loss": 1 / step} if step % 10 == 0 else {}))
    for line in range(200):
        train.log(f"step {line}")
    train.artifact("model.safetensors", b"x" * 2000)
    train.succeed({"loss": 0.01, "eval_loss": 0.01, "eval_accuracy": 0.99})
    verify = fleet.run(verify_spec(model={"job": train.job_id}))
    for index in range(32):
        verify.bound(index, 0.5 - index / 40, "verified" if index < 20 else "unknown")
    verify.succeed({"verdicts": {"verified": 20, "falsified": 0, "unknown": 12, "timeout": 0}, "instances": 32})
    compiled = fleet.run(compile_spec())
    compiled.artifact("report.json", json.dumps(REPORT).encode(), "application/json")
    compiled.succeed({"gate": {"train": "eager"}})
    failed = fleet.run(train_spec("broken"))
    failed.log("Traceback (most recent call last):", rank=1, stream="stderr")
    failed.fail(JobError(type="ValueError", message="no", rank=1))
    sweep = submit_sweep(fleet, "seeds", 4)
    for job in fleet.store.jobs.list(JobFilter(sweep=sweep)).items:
        fleet.begin(job.id).succeed({"loss": 0.1})
    jobs = {
        "train": train.job_id,
        "verify": verify.job_id,
        "compile": compiled.job_id,
        "failed": failed.job_id,
        "sweep": sweep,
    }
    lists = {name: f"/{name}" for name in ("hosts", "keys", "files", "specs", "submit")}
    compared = {"compare": f"/compare?ids={train.job_id},{failed.job_id},{verify.job_id}"}
    return {"jobs": "/", **lists, **compared, **{name: f"/jobs/{job_id}" for name, job_id in jobs.items()}}
