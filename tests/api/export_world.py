"""A service whose exports are looked at often, and a worker that says what its jobs have come to."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2
import pytest
import redis as redis_py
from api_world import Keys, Worker, bearer, serving
from pydantic import SecretStr
from waiting import eventually

from api.exports.sender import ExportTimes, JobExports
from service.jobs.records import Artifact, AttemptRef
from service.jobs.settings import Settings
from service.jobs.store import Store
from service.jobs.store.keyspace import EXPORTS_DUE

LOSSES = [2.5, math.nan, 1.25]
RESULT = {"loss": 1.25, "verdicts": {"verified": 3, "unknown": 1}, "gate": {"train": "inductor"}}
REPORT = b'{"of": "a job"}'
Service = tuple[str, Settings, Store]


class World:
    """A service with settings of its own, a key, and a worker that says what a job has come to."""

    def __init__(self, url: str, settings: Settings, store: Store) -> None:
        self.settings, self.store, self.worker = settings, store, Worker(store)
        self.client = httpx2.Client(base_url=url, headers=bearer(Keys(store)["submit"]), timeout=60.0)

    def submit(self, spec: dict[str, Any], **export: Any) -> str:
        answer = self.client.post("/v1/jobs", json={**spec, "export": export} if export else spec)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def run(self, spec: dict[str, Any], *, fails: bool = False, **export: Any) -> str:
        job = self.submit(spec, **export)
        ref = self.worker.start(job)
        self.worker.metrics(ref, LOSSES)
        self.publish(ref)
        if fails:
            self.worker.fail(ref)
        else:
            self.worker.succeed(ref, RESULT)
        return job

    def publish(self, ref: AttemptRef) -> None:
        folder = self.settings.layout.job(ref.job_id).artifacts
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_bytes(REPORT)
        entry = Artifact(
            name="report.json",
            bytes=len(REPORT),
            sha256=hashlib.sha256(REPORT).hexdigest(),
            media_type="application/json",
            created_at=datetime.now(UTC),
        )
        self.store.attempts.record_artifact(ref, entry)

    def lines(self, job: str) -> list[str]:
        """What the job's log says of exports."""
        logged = self.client.get(f"/v1/jobs/{job}/logs", params={"format": "jsonl", "stream": "service"})
        return [line for each in logged.text.splitlines() if "export" in (line := json.loads(each)["line"])]

    def exported(self, job: str, target: str) -> str:
        return str(eventually(lambda: next((x for x in self.lines(job) if x.startswith(f"exported to {target}")), "")))


@pytest.fixture
def world(service: Service, redis: redis_py.Redis) -> Iterator[World]:
    found = World(*service)
    with found.client:
        yield found


@contextmanager
def exporting(broker: str, data: Path, tokens: str, **given: Any) -> Iterator[Service]:
    """Serve until the end of the block; ``tokens`` are those for servers."""
    allowed = {"webhook_allow": "127.0.0.0/8", "export_tokens": SecretStr(tokens), **given}
    settings = Settings(data=data, redis_url=SecretStr(broker), **allowed)
    store = Store.connect(settings.broker_url, settings.layout, settings.store_limits)
    often = (ExportTimes(look_s=0.05),)
    with patch.object(JobExports.__init__, "__defaults__", often), serving(settings, store) as server:
        yield server.url, settings, store
    store.close()


def look(job: str, target: str, redis: redis_py.Redis) -> None:
    """Let the next look at a running job be now; wait until it is over."""

    def is_idle() -> bool:
        kept = redis.hmget(f"trivet:job:{job}", f"export_held:{target}", f"export:{target}")
        return kept[0] is None and kept[1] is not None

    eventually(is_idle)
    redis.zadd(EXPORTS_DUE(), {f"{job}:{target}": 1}, xx=True)
    eventually(lambda: redis.zscore(EXPORTS_DUE(), f"{job}:{target}") != 1)
    eventually(is_idle)
