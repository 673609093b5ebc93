"""Pages of every kind with something on them, where nothing changes any more."""

from __future__ import annotations

import json

from compile_report import REPORT
from fleet import Attempt, Fleet, compile_spec, submit_sweep, train_spec, verify_spec

from service.jobs.kinds.registry import spec_adapter
from service.jobs.records import JobError
from service.jobs.store import JobFilter
from service.jobs.store.keyspace import JOB


def ended_pages(fleet: Fleet) -> dict[str, str]:
    """The address of a page of every kind, by name; of jobs, ended ones."""
    train = _train(fleet)
    verify = _verify(fleet, train.job_id)
    compiled = fleet.run(compile_spec())
    compiled.artifact("report.json", json.dumps(REPORT).encode(), "application/json")
    compiled.succeed({"gate": {"train": "eager"}})
    failed = _fail(fleet)
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
    lists = {
        name: f"/{name}"
        for name in ("queue", "hosts", "files", "specs", "projects", "keys", "alerts", "audit", "docs", "submit")
    }
    compared = {"compare": f"/compare?ids={train.job_id},{failed.job_id},{verify.job_id}"}
    return {"jobs": "/", **lists, **compared, **{name: f"/jobs/{job_id}" for name, job_id in jobs.items()}}


def _train(fleet: Fleet) -> Attempt:
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
    return train


def _verify(fleet: Fleet, trained: str) -> Attempt:
    """Two verifications of a model, by two methods; the first has its layers."""
    verify = fleet.run(verify_spec(model={"job": trained}))
    for index in range(32):
        verify.bound(index, 0.5 - index / 40, "verified" if index < 20 else "unknown")
    layer = {"layer": "relu", "operator": "aten.relu.default", "neurons": 128, "mean_width": 0.4, "mean_unstable": 21.0}
    found = {"verdicts": {"verified": 20, "falsified": 0, "unknown": 12, "timeout": 0}, "instances": 32}
    verify.succeed({**found, "layers": [layer]})
    fleet.run(verify_spec(model={"job": trained}, method="ibp")).succeed(found)
    return verify


def _fail(fleet: Fleet) -> Attempt:
    """A job of a project, which fails with a traceback."""
    fleet.store.projects.create("perception", "what the cars see")
    fleet.store.projects.change("perception", {"queued_jobs": 100, "devices": 2})
    labels = {"team": "vision", "who": "engineers", "study": "learning-rates-and-widths"}
    spec = spec_adapter.validate_python(train_spec("broken", labels=labels))
    failed = fleet.begin(fleet.store.jobs.submit(spec, "annabelle", project="perception")[0].id)
    for line in ("Traceback (most recent call last):", *['  File "a.py", line 1, in run'] * 30, "ValueError: no"):
        failed.log(line, rank=1, stream="stderr")
    failed.log("the attempt ended", None, "service")
    failed.fail(JobError(type="ValueError", message="no", rank=1))
    fleet.store.jobs.client.call("HINCRBY", JOB(failed.job_id), "started_at", -754_000)
    return failed
