"""A service that answers every call of the command line with text of somebody's choice wherever there is text."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

TIME = "2026-01-02T03:04:05Z"


class Hostile(ThreadingHTTPServer):
    """Set ``text`` for what it says, and ``refusal`` for a status with which it refuses every call."""

    daemon_threads = True
    text: str = ""
    refusal: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hostile_service() -> Iterator[Hostile]:
    server = Hostile(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hostile

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        return

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        text = self.server.text
        if self.server.refusal is not None:
            problem = {"title": text, "status": self.server.refusal, "detail": f"{text}\n{text}"}
            if self.server.refusal == 422:
                problem["errors"] = [{"path": text, "message": text, "got": text, "expected": text}]
            self._send(self.server.refusal, "application/problem+json", json.dumps(problem).encode())
            return
        path = urlsplit(self.path).path
        if "text/event-stream" in self.headers.get("Accept", ""):
            self._send(200, "text/event-stream", _stream(text))
        elif path.endswith("/logs"):
            jsonl = "format=jsonl" in self.path
            line = json.dumps(_log(text)) if jsonl else text.replace("\n", " ")
            self._send(200, "text/plain; charset=utf-8", line.encode("utf-8", "replace") + b"\n")
        elif "/artifacts/" in path:
            self._send(200, "application/octet-stream", b"bytes")
        elif self.command == "DELETE":
            self._send(204, "text/plain", b"")
        else:
            self._send(200, "application/json", json.dumps(body(path, text)).encode())

    def _send(self, status: int, media_type: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def job(text: str, state: str = "failed") -> dict[str, Any]:
    return {
        "id": text, "kind": "train", "name": text, "labels": {text: text}, "owner": text, "state": state, "attempt": 1,
        "priority": 0, "created_at": TIME, "started_at": TIME, "ended_at": TIME, "reason": text,
        "progress": {"done": 1, "total": 2, "unit": text},
        "placement": [{"host": text, "devices": [0], "pool": "cpu"}],
        "spec": {text: [text]}, "result": {text: {"deep": text}},
        "error": {"type": text, "message": f"{text}\n{text}", "rank": 0, "traceback_artifact": text},
    }  # fmt: skip


def host(text: str) -> dict[str, Any]:
    return {
        "name": text, "alive": True, "draining": False, "address": text, "cuda": [text], "cpu_slots": 4,
        "free": {"cpu": [0]}, "running": [text], "seen_at": TIME, "versions": {text: text},
    }  # fmt: skip


def key(text: str) -> dict[str, Any]:
    return {"id": text, "name": text, "scopes": ["admin"], "created_at": TIME, "last_used_at": TIME, "secret": text}


def body(path: str, text: str) -> Any:
    """The JSON of an answer; strings that the protocol fixes, such as a job's state, are the only ones not chosen."""
    ends = {
        "/v1/jobs": {**job(text), "items": [job(text)], "next_cursor": None},
        "/v1/hosts": {"items": [host(text)]},
        "/v1/keys": {**key(text), "items": [key(text)]},
        "/v1/kinds": _kinds(text),
        "/v1/files": {"id": text, "sha256": text, "bytes": 1, "media_type": text},
        "/metrics": {"series": {text: {"step": [1, 2], "time": [1.0, 2.0], "value": [0.5, 0.25]}}},
        "/bounds": {"items": [_row(text)], "next_cursor": None},
        "/report": _report(text),
        "/artifacts": {
            "items": [{"name": text, "bytes": 1, "sha256": text, "media_type": text, "created_at": TIME}],
        },
        "/schedule": _plan(text),
        "/drain": host(text),
        "/resume": host(text),
    }
    return next((value for end, value in ends.items() if path.endswith(end)), job(text))


def _kinds(text: str) -> dict[str, Any]:
    choice = {"name": text, "description": text, "distribution": text, "version": text, "schema": {text: text}}
    broken = {"group": text, "name": text, "distribution": text, "version": text, "reason": f"{text}\n{text}"}
    named = {what: [choice] for what in ("families", "sources", "objectives", "programs")}
    return {"items": [{"kind": text, "description": text}], **named, "unavailable": [broken]}


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


def _log(text: str) -> dict[str, Any]:
    return {"id": None, "time": 1.0, "rank": 0, "stream": "stdout", "line": text, "type": "log"}


def _stream(text: str) -> bytes:
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
