"""What the store's tests submit, under which limits, and what they do to hosts and jobs."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
import redis as redis_py
from digits import digits_job

from service.jobs.records import AttemptRef, Job, JobError, PartOutcome
from service.jobs.spec.train import TrainSpec
from service.jobs.spec.verify import VerifySpec
from service.jobs.store import HostReport, Store, StoreLimits, stubs
from service.jobs.store.hosts import HeartbeatReply
from service.jobs.store.keyspace import CLOCK, HOSTS, LEASES, PLACEMENT_IDLE

T = TypeVar("T")

LIMITS = StoreLimits(
    lease_s=3600,
    starting_lease_s=3600,
    heartbeat_s=3600,
    redispatch_s=3600,
    max_queue_bypass_s=600,
    max_lost_attempts=2,
)
"""Nothing ends by itself however slow the machine is; tests end it by rewriting a score."""

FAILED = PartOutcome("failed", error=JobError(type="ValueError", message="no", rank=1))
DONE = PartOutcome("succeeded", {"loss": 1.0})
LOG: Any = {"type": "log", "time": 1.0, "rank": 0, "stream": "stdout", "line": "hello"}


def at_once(ask: Callable[[], T], times: int = 6) -> list[T]:
    """What several threads are told that ask at the same moment."""
    gate = threading.Barrier(times)

    def ask_with_others(_: int) -> T:
        gate.wait()
        return ask()

    with ThreadPoolExecutor(times) as threads:
        return list(threads.map(ask_with_others, range(times)))


@dataclass(frozen=True)
class World:
    """What happens around a store: jobs come, hosts report, time passes."""

    store: Store
    redis: redis_py.Redis

    def submit(self, ranks: int = 1, **fields: Any) -> Job:
        return self.store.jobs.submit(train(ranks, **fields), "ada")[0]

    def beat(self, name: str, cpu: int = 0, cuda: int = 0, live: tuple[str, ...] = ()) -> HeartbeatReply:
        report = HostReport(name, f"{name}.example", ("Test GPU",) * cuda, cpu, {"trivet": "0"}, live)
        return self.store.hosts.beat(report)

    def start(self, job: Job) -> list[AttemptRef]:
        """Place a job and claim all its parts."""
        assert job.id in self.store.attempts.place()
        refs = parts(self.store.jobs.get(job.id))
        for ref in refs:
            self.store.attempts.claim(ref, f"supervisor-of-{ref}")
        return refs

    def expire(self, ref: AttemptRef) -> None:
        """End a lease now, as if its time had passed."""
        assert self.redis.zadd(LEASES(), {str(ref): 1}, xx=True, ch=True) == 1

    def silence(self, host: str) -> None:
        """End a host's heartbeat now."""
        assert self.redis.zadd(HOSTS(), {host: 1}, xx=True, ch=True) == 1

    def pass_time(self, seconds: float) -> None:
        """Let seconds pass on the store's own clock."""
        self.redis.hincrby(CLOCK(), "now", round(seconds * 1000))
        self.redis.delete(PLACEMENT_IDLE())

    def states(self, job: Job) -> list[str]:
        """The states that a job's stream tells of, in order."""
        page = self.store.events.page(job.id, types={"state"}, limit=1000)
        return [stored.event["state"] for stored in page.items]


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
