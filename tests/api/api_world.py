"""Specs, a fake worker and small helpers for the API's tests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx2
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from served_app import served

from api.main import create_app
from service.jobs.accounts import Scope
from service.jobs.events import Event
from service.jobs.records import AttemptRef, Conflict, Job, JobError, PartOutcome
from service.jobs.settings import Settings
from service.jobs.store import HostReport, Store

MLP = {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10}
TRAIN: dict[str, Any] = {"kind": "train", "model": MLP, "data": {"source": "digits"}, "steps": 10}
VERIFY: dict[str, Any] = {
    "kind": "verify",
    "model": MLP,
    "property": {"robustness": {"data": {"source": "digits"}, "eps": 0.01}},
}
COMPILE: dict[str, Any] = {"kind": "compile", "model": MLP}


@dataclass(frozen=True)
class Keys:
    """A secret per scope; each key is named like its scope."""

    store: Store

    def __getitem__(self, scope: Scope) -> str:
        return self.named(scope, scope)

    def named(self, name: str, *scopes: Scope) -> str:
        return self.store.keys.create(name, scopes)[1]

    def of(self, project: str, scope: Scope, name: str = "ann") -> str:
        """A secret in a project, which is made where it is missing."""
        with suppress(Conflict):
            self.store.projects.create(project)
        return self.store.keys.create(name, [scope], project)[1]


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def job_of(client: TestClient, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/jobs/{job_id}").json()
    return found


@dataclass
class Worker:
    """Stands in for a host: claims what is placed on it and reports what a test says."""

    store: Store
    name: str = "fake"

    def beat(self, **report: Any) -> None:
        self.store.hosts.beat(HostReport(self.name, "127.0.0.1", **{"cpu_slots": 4, **report}))

    def start(self, job_id: str) -> AttemptRef:
        """Run the job here: it is ``running`` afterwards."""
        self.beat()
        self.store.attempts.place()
        ref = AttemptRef(job_id, self.store.jobs.get(job_id).attempt, self.name)
        self.store.attempts.claim(ref, "supervisor")
        return ref

    def emit(self, ref: AttemptRef, events: Sequence[dict[str, Any]]) -> None:
        full: list[Event] = [{"time": time.time(), "rank": 0, **event} for event in events]  # type: ignore[typeddict-item]
        self.store.attempts.emit(ref, full)

    def metrics(self, ref: AttemptRef, values: Sequence[float], *, first: int = 1, name: str = "loss") -> None:
        steps = enumerate(values, start=first)
        self.emit(ref, [{"type": "metric", "step": step, "values": {name: value}} for step, value in steps])

    def succeed(self, ref: AttemptRef, result: dict[str, Any] | None = None) -> Job:
        return self.store.attempts.finish(ref, PartOutcome("succeeded", result=result or {"loss": 0.5}))

    def fail(self, ref: AttemptRef, message: str = "it broke", *, final: bool = False) -> Job:
        error = JobError(type="RuntimeError", message=message, final=final)
        return self.store.attempts.finish(ref, PartOutcome("failed", error=error))


def submit(client: TestClient, spec: dict[str, Any] | None = None, **changes: Any) -> str:
    answer = client.post("/v1/jobs", json={**(spec or TRAIN), **changes})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


@dataclass(frozen=True)
class Server:
    """A real server on a socket."""

    url: str
    uvicorn: uvicorn.Server
    app: FastAPI


@contextmanager
def serving(settings: Settings, store: Store) -> Iterator[Server]:
    """The application on a socket of its own, until the block ends."""
    app = create_app(settings, store)
    with served(app) as (url, server):
        yield Server(url, server, app)


@contextmanager
def listening(url: str, secret: str, **headers: str) -> Iterator[Iterator[httpx2.ServerSentEvent]]:
    """The events of a live stream, as they come."""
    sent = {"Accept": "text/event-stream", **bearer(secret), **{k.replace("_", "-"): v for k, v in headers.items()}}
    with httpx2.stream("GET", url, headers=sent, timeout=300.0) as response:
        assert response.status_code == 200, response.read()
        yield (event for event in httpx2.EventSource(response) if event.event != "message")
