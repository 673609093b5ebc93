"""Checks the service's promises on the outside observations of a chaos run, without side effects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from service.jobs.records import Artifact, Host, Job
from service.jobs.spec.common import TERMINAL

Event = Mapping[str, Any]

MOVES: Mapping[str | None, frozenset[str]] = {
    None: frozenset({"queued"}),
    "queued": frozenset({"starting", "running", "cancelled", "failed"}),
    "starting": frozenset({"running", "queued", "cancelling", "failed"}),
    "running": frozenset({"succeeded", "failed", "queued", "cancelling"}),
    "cancelling": frozenset({"cancelled", "succeeded", "failed"}),
    "succeeded": frozenset(),
    "failed": frozenset({"queued"}),
    "cancelled": frozenset({"queued"}),
}
"""States that may follow a state; a queued job runs again when the supervisor of an attempt given up for lost is back.
Written down here and not taken from the store, which is under test.
"""


@dataclass(frozen=True)
class Violation:
    """A broken promise: its name, and the evidence."""

    promise: str
    text: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.text}"


@dataclass
class Accepted:
    """A job that was answered 201, and the later requests about it."""

    form: str
    spec: Mapping[str, Any]
    idempotency_key: str
    cancels: int = 0
    retries: int = 0
    retries_unknown: bool = False
    """A retry's answer was lost, so how often the job may end is not known."""
    deleted: bool = False
    followed: list[str] | None = None
    """Ids of the events that a follower got, once its stream has ended."""
    gaps: int = field(default=0)


def check_job(job: Job, events: Sequence[Event], accepted: Accepted) -> list[Violation]:
    """Check one ended job: its states, the order of its events, and that a success is complete."""
    return [
        *_check_order(job, events),
        *_check_states(job, events, accepted),
        *_check_repetition(job, events),
        *(_check_success(job, events) if job.state == "succeeded" else []),
        *_check_follower(job, events, accepted),
    ]


def check_artifact(job_id: str, artifact: Artifact, content: bytes) -> list[Violation]:
    """Check that the bytes served are those of the manifest."""
    sha256 = hashlib.sha256(content).hexdigest()
    if artifact.sha256 in ("", None) or (artifact.sha256 == sha256 and artifact.bytes == len(content)):
        return []
    told = f"{artifact.bytes} bytes {artifact.sha256[:12]}"
    return [
        Violation("manifest equals bytes", f"{job_id}/{artifact.name}: {told}, served {len(content)} {sha256[:12]}")
    ]


def check_devices(hosts: Iterable[Host]) -> list[Violation]:
    """Check that no device is held by two parts, nor free and held at once."""
    found = []
    for host in hosts:
        held = [(part.pool, device) for part in host.held for device in part.devices]
        twice = {device for device in held if held.count(device) > 1}
        free = {(pool, device) for pool, devices in host.free.items() for device in devices}
        if twice or free & set(held):
            found.append(
                Violation("devices held once", f"{host.name}: twice {twice}, free and held {free & set(held)}")
            )
    return found


def _check_order(job: Job, events: Sequence[Event]) -> list[Violation]:
    ids = [tuple(int(part) for part in event["id"].split("-")) for event in events]
    if all(first < second for first, second in pairwise(ids)):
        return []
    return [Violation("events in order", f"{job.id}: ids do not grow")]


def _check_states(job: Job, events: Sequence[Event], accepted: Accepted) -> list[Violation]:
    found: list[Violation] = []
    state, attempt, ends = None, 0, 0
    for event in events:
        if event["type"] == "state":
            if event["state"] not in MOVES[state]:
                found.append(Violation("states follow each other", f"{job.id}: {state} -> {event['state']}"))
            if event["attempt"] < attempt and not (
                event["state"] == "running" and "is back" in (event["reason"] or "")
            ):
                found.append(Violation("attempts count up", f"{job.id}: attempt {attempt} -> {event['attempt']}"))
            state, attempt = event["state"], event["attempt"]
            ends += state in TERMINAL
        elif state in TERMINAL:
            found.append(Violation("nothing after the end", f"{job.id}: {event['type']} after {state}"))
            break
    if state != job.state:
        found.append(Violation("record equals events", f"{job.id}: last event says {state}, record {job.state}"))
    if not accepted.retries_unknown and ends != accepted.retries + 1:
        found.append(Violation("one terminal state", f"{job.id}: {ends} ends, {accepted.retries} retries asked for"))
    if job.state == "cancelled" and not accepted.cancels:
        found.append(Violation("cancelled when asked", f"{job.id}: nobody cancelled it"))
    return found


def _check_repetition(job: Job, events: Sequence[Event]) -> list[Violation]:
    attempt, seen = 0, set[tuple[int, int]]()
    for event in events:
        if event["type"] == "state":
            attempt = event["attempt"]
        elif event["type"] == "metric" and "loss" in event["values"]:
            if (attempt, event["step"]) in seen:
                return [Violation("each event once", f"{job.id}: step {event['step']} twice in attempt {attempt}")]
            seen.add((attempt, event["step"]))
    return []


def _check_success(job: Job, events: Sequence[Event]) -> list[Violation]:
    result = job.result or {}
    if job.kind == "train":
        steps = job.spec["steps"]
        if result.get("steps") != steps or result.get("stopped"):
            return [Violation("success is complete", f"{job.id}: {result.get('steps')} of {steps} steps")]
        told = {event["step"] for event in events if event["type"] == "metric" and "loss" in event["values"]}
        if missing := sorted(set(range(1, steps + 1)) - told):
            return [Violation("history is whole", f"{job.id}: {len(missing)} steps missing, as {missing[:5]}")]
    if job.kind == "verify":
        count = job.spec["property"].get("robustness", {}).get("count", 1)
        rows = {event["instance"] for event in events if event["type"] == "bound"}
        verdicts = sum(result.get("verdicts", {}).values())
        if len(rows) != count or verdicts != count:
            return [Violation("success is complete", f"{job.id}: {len(rows)} rows, {verdicts} verdicts of {count}")]
    return []


def _check_follower(job: Job, events: Sequence[Event], accepted: Accepted) -> list[Violation]:
    """A follower got every event once; if the stream told of a gap, events may be missing but none may repeat."""
    if accepted.followed is None or accepted.retries or accepted.retries_unknown:
        return []
    got, want = accepted.followed, [event["id"] for event in events]
    repeated = len(got) - len(set(got))
    missing = 0 if accepted.gaps else len(set(want) - set(got))
    if repeated or missing:
        return [Violation("a stream loses nothing", f"{job.id}: {missing} events missing, {repeated} repeated")]
    return []
