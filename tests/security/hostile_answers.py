"""Answers of the service in which each string that is free is a text of somebody's choice."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any

TIME = "2026-01-02T03:04:05Z"


def body(path: str, text: str) -> Any:
    """Return the JSON of an answer. Strings that the protocol fixes, such as a job's state, are as it says; all others
    are ``text``.
    """
    answers = {
        "/v1/jobs": {**_job(text), "items": [_job(text)], "next_cursor": None},
        "/v1/jobs:batch": {"items": [{"id": text}, {"id": text}]},
        "/v1/jobs:check": {"errors": [{"path": text, "message": text, "got": text, "expected": text}]},
        "/v1/jobs/sweep": _sweep(text),
        "/v1/jobs/*/metrics": {"series": {text: {"step": [1, 2], "time": [1.0, 2.0], "value": [0.5, 0.25]}}},
        "/readyz": {"status": text},
        "/v1/jobs/*/bounds": {"items": [_row(text)], "next_cursor": None},
        "/v1/jobs/*/report": _report(text),
        "/v1/jobs/*/artifacts": {
            "items": [{"name": text, "bytes": 1, "sha256": text, "media_type": text, "created_at": TIME}],
        },
        "/v1/jobs/*/schedule": _plan(text),
        "/v1/jobs/*/notices": {"items": [_delivery(text)]},
        "/v1/jobs/*": _job(text),
        "/v1/queue": {"items": [_waiting(text)], "pending": 2, "dependent": 1, "next_cursor": text},
        "/v1/shares": {"items": [_share(text)]},
        "/v1/shares/*": _share(text),
        "/v1/hosts": {"items": [_host(text)]},
        "/v1/hosts/*": _host(text),
        "/v1/alerts": {"items": [_alert(text)]},
        "/v1/kinds": _kinds(text),
        "/v1/files": {**_file(text), "items": [_file(text)], "next_cursor": None},
        "/v1/projects": {**_project(text), "items": [_project(text)]},
        "/v1/projects/*": _project(text),
        "/v1/keys": {**_key(text), "items": [_key(text)]},
        "/v1/keys/*/rotate": _key(text),
        "/v1/accounts": {**_account(text), "items": [_account(text)]},
        "/v1/accounts/*/keys": _key(text),
        "/v1/accounts/*": _account(text),
        "/v1/audit": {"items": [_entry(text)], "next_cursor": text, "head": {"number": 1, "hash": text}},
        "/v1/webhooks": {**_webhook(text), "items": [_webhook(text)]},
        "/v1/webhooks/secret*": {"project": text, "secret": text},
        "/v1/webhooks/*/deliveries": {"items": [_delivery(text)]},
    }
    return next(answer for pattern, answer in answers.items() if fnmatchcase(path, pattern))


def _job(text: str, state: str = "failed") -> dict[str, Any]:
    return {
        "id": text, "kind": "train", "name": text, "labels": {text: text}, "owner": text, "project": text,
        "shared_with": [text], "state": state, "attempt": 1, "priority": 0,
        "created_at": TIME, "started_at": TIME, "ended_at": TIME, "reason": text,
        "progress": {"done": 1, "total": 2, "unit": text, "share": 0.5, "phase": text},
        "placement": [{"host": text, "devices": [0], "pool": "cpu"}],
        "spec": {text: [text], "notify": {"webhook": text}}, "result": {text: {"deep": text}}, "sweep": text,
        "parameters": {text: text},
        "error": {"type": text, "message": f"{text}\n{text}", "rank": 0, "traceback_artifact": text},
    }  # fmt: skip


def _sweep(text: str) -> dict[str, Any]:
    children = {"total": 1, "failed": 1, "best": {"job": text, "value": 0.5}}
    return {**_job(text), "spec": {"sweep": {"best": {"metric": text}}}, "children": children}


def _waiting(text: str) -> dict[str, Any]:
    return {
        "job": text, "kind": text, "name": text, "owner": text, "project": text, "priority": 0, "place": 1,
        "reason": text, "start": {"at": TIME, "rests_on": ["durations"]},
    }  # fmt: skip


def _share(text: str) -> dict[str, Any]:
    return {"project": text, "weight": 1.0, "used_s": 1.0, "devices": 1, "share": 1.0}


def _host(text: str) -> dict[str, Any]:
    return {
        "name": text, "alive": True, "draining": False, "address": text, "cuda": [text], "cpu_slots": 4,
        "free": {"cpu": [0]}, "running": [text], "seen_at": TIME, "versions": {text: text}, "isolation": [text],
        "held": [{"job": text, "attempt": 1, "pool": "cpu", "devices": [1]}],
        "failing": {"reason": text, "since": TIME, "failed_starts": 3, "retry_in_s": 1.0},
    }  # fmt: skip


def _alert(text: str) -> dict[str, Any]:
    return {
        "name": text, "severity": "critical", "state": "firing", "labels": {text: text}, "value": 1.0, "since": TIME,
        "meaning": text, "action": text, "expression": text,
    }  # fmt: skip


def _file(text: str) -> dict[str, Any]:
    return {
        "id": text, "sha256": text, "bytes": 1, "media_type": text, "name": text, "project": text, "owner": text,
        "created_at": TIME, "last_used_at": TIME, "expires_at": TIME, "in_use": False, "job_count": 1, "jobs": [text],
    }  # fmt: skip


def _project(text: str) -> dict[str, Any]:
    return {
        "name": text, "description": text, "created_at": TIME, "quotas": {"queued_jobs": 3, "highest_priority": 1},
        "members": [{"name": text, "role": "viewer"}], "usage": {
            "queued_jobs": 1, "devices": 1, "device_hours": 0.5, "upload_bytes": 1, "artifact_bytes": 1,
        },
    }  # fmt: skip


def _key(text: str) -> dict[str, Any]:
    return {
        "id": text, "name": text, "scopes": ["admin"], "project": text, "created_at": TIME, "last_used_at": TIME,
        "expires_at": TIME, "successor": text, "secret": text,
    }  # fmt: skip


def _account(text: str) -> dict[str, Any]:
    return {"name": text, "scopes": ["submit"], "project": text, "created_at": TIME, "keys": [_key(text)]}


def _entry(text: str) -> dict[str, Any]:
    return {
        "action": "job.submit", "actor": text, "key": text, "session": text, "address": text, "job": text,
        "subject": text, "detail": {text: text}, "number": 1, "time": TIME, "previous": text, "hash": text,
    }  # fmt: skip


def audit_line(text: str) -> str:
    """Return a line of an export."""
    return json.dumps(_entry(text), ensure_ascii=False)


def _webhook(text: str) -> dict[str, Any]:
    return {
        "id": text, "url": text, "project": text, "states": ["failed"], "kinds": [text], "created_at": TIME,
        "created_by": text, "failing_since": TIME, "secret": text,
    }  # fmt: skip


def _delivery(text: str) -> dict[str, Any]:
    change = {
        "job": text, "name": text, "kind": text, "owner": text, "project": text, "state": "failed", "attempt": 1,
        "reason": text,
    }  # fmt: skip
    return {
        "id": text, "event": {"type": text, "timestamp": TIME, "data": change}, "state": "failed", "attempts": 1,
        "first_at": TIME, "last_at": TIME, "status": 500, "error": text,
    }  # fmt: skip


def _kinds(text: str) -> dict[str, Any]:
    choice = {"name": text, "description": text, "distribution": text, "version": text, "schema": {text: text}}
    broken = {"group": text, "name": text, "distribution": text, "version": text, "reason": f"{text}\n{text}"}
    named = {what: [choice] for what in ("families", "sources", "objectives", "optimizers", "schedules", "programs")}
    return {"items": [{**choice, "kind": text}], **named, "unavailable": [broken]}


def _row(text: str) -> dict[str, Any]:
    return {
        "instance": 0, "name": text, "label": 1, "prediction": 2, "verdict": text, "lower": [0.0], "upper": [1.0],
        "margin": 0.5, "method": text, "decided_by": text, "reason": text, "seconds": 0.1, "domains": 1,
        "counterexample": [0.0], "counterexample_outputs": [0.0], "onnxruntime_outputs": [0.0],
    }  # fmt: skip


def _report(text: str) -> dict[str, Any]:
    rung = {"phase": text, "rung": text, "verdict": text, "graph_breaks": [text], "recompiles": [], "noisy": True,
            "step_ms": 1.0, "eager_step_ms": 2.0, "ratio": 0.5}  # fmt: skip
    return {"summary": [text], "rungs": [rung], "gate": {"train": text, "inference": None}}


def _plan(text: str) -> dict[str, Any]:
    cell = {"op": text, "stage": 0, "micro_batch": 0, "start": 0.0, "end": 1.0}
    row = {"rank": 0, "stages": [0], "peak_activations": 1, "peak_buffers": 1, "cells": [cell]}
    return {"schedule": text, "ranks": 1, "stages": 1, "micro_batches": 1, "bubble": 0.5, "duration": 1.0,
            "rows": [row]}  # fmt: skip


def log_line(text: str) -> str:
    """Return a line of a log as JSON."""
    event = {"id": None, "time": 1.0, "rank": 0, "stream": "stdout", "line": text, "type": "log"}
    return json.dumps(event, ensure_ascii=False)


def stream(text: str) -> bytes:
    """Return a stream of a job's events, from its state to its end."""
    events: list[dict[str, Any]] = [
        {"type": "state", "state": text, "reason": text},
        {"type": "progress", "done": 1, "total": 2, "unit": text},
        {"type": "metric", "step": 1, "values": {text: 0.5, f"{text}/passed": 1.0, "loss": 0.5}},
        {"type": "bound", "instance": 0, "verdict": text},
        {"type": "search", "instance": 0, "domains": 1, "open": 1, "bound": 0.5},
        {"type": "log", "line": text, "stream": "stdout"},
        {"type": "error", "error": text, "message": f"{text}\n{text}"},
        {"type": "gap", "first": text},
        {"type": "state", "state": "failed", "reason": text},
    ]
    common = {"job": text, "rank": 0, "time": 1.0}
    told = "".join(
        f"id: {number}-0\nevent: {event['type']}\ndata: {json.dumps({**common, **event})}\n\n"
        for number, event in enumerate(events, start=1)
    )
    return f"{told}event: end\ndata: {{}}\n\n".encode()
