"""A fleet for tests of the dashboard: real jobs in a real store, driven through the calls that supervisors make."""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from digits import digits_job
from onnx import TensorProto, helper

from api.requests.sweeps import children_of
from service.jobs.events import Event, LogEvent, MetricEvent, ProgressEvent
from service.jobs.events.event import SearchEvent
from service.jobs.files import DataLayout
from service.jobs.kinds.registry import spec_adapter
from service.jobs.records import Artifact, AttemptRef, Job, JobError, PartOutcome
from service.jobs.store import HostReport, Store

SUPERVISOR = "test"


def train_spec(name: str = "digits-mlp", **changes: Any) -> dict[str, Any]:
    """A small training job."""
    return {**digits_job(64, 64, name=name, steps=100, device="cpu"), **changes}


def verify_spec(name: str = "digits-robustness", **changes: Any) -> dict[str, Any]:
    """A small verification job."""
    spec = {
        "kind": "verify",
        "name": name,
        "model": {"family": "mlp", "in_features": 64, "hidden": [64, 64], "out_features": 10},
        "property": {"robustness": {"data": {"source": "digits"}, "count": 32, "eps": 0.02}},
        "device": "cpu",
    }
    return {**spec, **changes}


def paired_spec(store: Store) -> dict[str, Any]:
    """A verification job about the model that an archive brings."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 1)) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "network", ports[:1], ports[1:])
    query = "".join(f"(declare-const {name} Real)" for name in ("X_0", "Y_0"))
    query += "(assert (>= X_0 0))(assert (<= X_0 1))(assert (<= Y_0 0))"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(
            "a.onnx", helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
        )
        archive.writestr("one.vnnlib", query)
        archive.writestr("instances.csv", "a.onnx,one.vnnlib")
    content.seek(0)
    file = store.files.add(content, "application/zip")
    return {"kind": "verify", "property": {"instances": file.id}, "device": "cpu"}


def compile_spec(name: str = "compile-check", **changes: Any) -> dict[str, Any]:
    """A small compile check."""
    spec = {
        "kind": "compile",
        "name": name,
        "model": {"family": "transformer", "vocab_size": 256, "dim": 64, "layers": 2, "heads": 4},
        "device": "cpu",
    }
    return {**spec, **changes}


def event(kind: str, rank: int | None, **fields: Any) -> Event:
    return {"type": kind, "time": time.time(), "rank": rank, **fields}  # type: ignore[typeddict-item]


@dataclass(frozen=True)
class Attempt:
    """One attempt that runs, as its supervisor sees it."""

    store: Store
    data: DataLayout
    refs: tuple[AttemptRef, ...]

    @property
    def job_id(self) -> str:
        return self.refs[0].job_id

    def emit(self, *events: Event, progress: ProgressEvent | None = None) -> None:
        self.store.attempts.emit(self.refs[0], events, progress)

    def metric(self, step: int, *, of: int | None = None, **values: float) -> None:
        """A metric of a step; with ``of``, progress towards that many steps."""
        found: MetricEvent = event("metric", 0, step=step, values=values)  # type: ignore[assignment]
        progress: ProgressEvent | None = None
        events: list[Event] = [found]
        if of is not None:
            progress = event("progress", 0, done=step, total=of, unit="steps")  # type: ignore[assignment]
            assert progress is not None
            events.append(progress)
        self.emit(*events, progress=progress)

    def log(self, line: str, rank: int | None = 0, stream: str = "stdout") -> None:
        found: LogEvent = event("log", rank, stream=stream, line=line)  # type: ignore[assignment]
        self.emit(found)

    def bound(self, instance: int, margin: float | None, verdict: str = "verified", **changes: Any) -> None:
        """A row; without a margin nothing is bounded."""
        fields: dict[str, Any] = {
            "verdict": verdict,
            "lower": [None if margin is None else margin - 0.4 + 0.05 * index for index in range(10)],
            "upper": [None if margin is None else margin + 0.3 + 0.07 * index for index in range(10)],
            "margin": margin,
            "name": None,
            "method": "crown",
            "decided_by": "bounds",
            "seconds": 0.0123,
            "domains": 1,
            "counterexample": None,
        }
        self.emit(event("bound", 0, instance=instance, **(fields | changes)))

    def search(self, instance: int, **fields: Any) -> None:
        found: SearchEvent = event("search", 0, instance=instance, **fields)  # type: ignore[assignment]
        self.emit(found)

    def record(self, *events: Event) -> None:
        """Events that are on record of this attempt and not in the stream."""
        folder = self.data.job(self.job_id).attempt(self.refs[0].attempt)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "events.rank-0.jsonl").open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(each) + "\n" for each in events))

    def artifact(self, name: str, content: bytes, media_type: str = "application/octet-stream") -> None:
        path = self.data.job(self.job_id).artifacts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        artifact = Artifact.model_validate(
            {
                "name": name,
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
                "media_type": media_type,
                "created_at": now,
            }
        )
        self.store.attempts.record_artifact(self.refs[0], artifact)

    def succeed(self, result: Mapping[str, Any] | None = None) -> None:
        outcome = PartOutcome("succeeded", result=dict(result or {}))
        for ref in self.refs:
            self.store.attempts.finish(ref, outcome)

    def fail(self, error: JobError) -> None:
        for ref in self.refs:
            self.store.attempts.finish(ref, PartOutcome("failed", error=error))

    def stop(self) -> None:
        for ref in self.refs:
            self.store.attempts.finish(ref, PartOutcome("stopped"))


@dataclass(frozen=True)
class Fleet:
    """Hosts that exist on paper, and what runs on them."""

    store: Store
    data: DataLayout
    owner: str = "admin"

    def host(self, name: str, *, cuda: Sequence[str] = (), cpu: int = 4) -> None:
        versions = {"trivet": "0.1.0", "torch": "2.13.0", "python": "3.11.9"}
        self.store.hosts.beat(HostReport(name, "10.0.0.7", tuple(cuda), cpu, versions))

    def submit(self, spec: Mapping[str, Any]) -> Job:
        job, _ = self.store.jobs.submit(spec_adapter.validate_python(dict(spec)), self.owner)
        return job

    def begin(self, job_id: str) -> Attempt:
        """Place the job and claim all its parts: it runs."""
        self.store.attempts.place()
        job = self.store.jobs.get(job_id)
        refs = tuple(AttemptRef(job.id, job.attempt, share.host) for share in job.placement)
        assert refs, f"{job_id} was not placed: {job.reason}"
        for ref in refs:
            self.store.attempts.claim(ref, SUPERVISOR)
        return Attempt(self.store, self.data, refs)

    def run(self, spec: Mapping[str, Any]) -> Attempt:
        return self.begin(self.submit(spec).id)


def submit_sweep(fleet: Fleet, name: str, values: int) -> str:
    """Submit a sweep over seeds; return its parent."""
    spec = train_spec(name, sweep={"grid": {"seed": list(range(values))}, "best": {"metric": "loss", "mode": "min"}})
    jobs = fleet.store.jobs
    parent = jobs.submission(spec_adapter.validate_python(spec), fleet.owner, project="default")
    job, _ = fleet.store.sweeps.accept(parent, children_of(parent.spec))
    return job.id
