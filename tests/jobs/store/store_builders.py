"""What the store's tests submit, and under which limits."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import orjson
from digits import digits_job

from service.jobs.records import AttemptRef, Job, JobError, PartOutcome
from service.jobs.spec.train import TrainSpec
from service.jobs.spec.verify import VerifySpec
from service.jobs.store import Store, StoreLimits, stubs

LIMITS = StoreLimits(
    lease_s=3600,
    starting_lease_s=3600,
    heartbeat_s=3600,
    redispatch_s=3600,
    max_queue_bypass_s=600,
    max_lost_attempts=2,
)
"""Nothing ends by itself however slow the machine is; tests end it by rewriting a score."""

Submit = Callable[..., Job]
Start = Callable[[Job], list[AttemptRef]]
Expire = Callable[[AttemptRef], None]
PassTime = Callable[[float], None]
FAILED = PartOutcome("failed", error=JobError(type="ValueError", message="no", rank=1))
DONE = PartOutcome("succeeded", {"loss": 1.0})
LOG: Any = {"type": "log", "time": 1.0, "rank": 0, "stream": "stdout", "line": "hello"}


def live(ref: AttemptRef) -> str:
    return f"{ref.job_id}:{ref.attempt}"


def parts(job: Job) -> list[AttemptRef]:
    return [AttemptRef(job.id, job.attempt, share.host) for share in job.placement]


def train(ranks: int = 1, **fields: Any) -> TrainSpec:
    """A small valid training spec over ``ranks`` data-parallel ranks."""
    return TrainSpec.model_validate({**digits_job(batch={"global": ranks}, parallel={"dp_shard": ranks}), **fields})


def verify(job_id: str) -> VerifySpec:
    prop = {"robustness": {"data": {"source": "digits"}, "eps": 0.1}}
    return VerifySpec.model_validate({"model": {"job": job_id}, "property": prop})


def submit_for(store: Store, project: str, ranks: int = 1, **fields: Any) -> str:
    """Submit a job of a project through the script alone."""
    record = {
        "kind": "train", "name": "", "labels": "{}", "owner": "ada", "priority": "0", "retries": "0", "after": "[]",
        "indexes": "[]", "spec": "{}", "shape": f"cpu:{ranks}:1", "project": project, **fields,
    }  # fmt: skip
    suffix = secrets.token_hex(6)[:11]
    entry = {"idem": "", "body_hash": "", "suffix": suffix, "record": record, "indexes": [], "after": [], "files": []}
    entries = orjson.dumps([entry]).decode()
    return stubs.submit(store.client, limits=store.jobs.limits.script_argument, entries=entries)[0][1]
