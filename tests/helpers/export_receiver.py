"""A server on loopback for exports: a collector, and as much of an MLflow server as an export asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from http_receiver import Reply, Request, listening


@dataclass
class ExportReceiver:
    """Keeps what it gets. Answers the next requests with ``refusals`` first: a status, or another answer."""

    url: str = ""
    refusals: list[int | dict[str, Any]] = field(default_factory=list)
    taken: list[Request] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def answer(self, request: Request) -> tuple[int, dict[str, Any]]:
        self.taken.append(request)
        if self.refusals:
            refusal = self.refusals.pop(0)
            return (200, refusal) if isinstance(refusal, dict) else (refusal, {"error_code": "TEMPORARILY_UNAVAILABLE"})
        call = urlsplit(request.path).path.removeprefix("/api/2.0/mlflow")
        if call == "/experiments/get-by-name":
            return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST"}
        if call == "/experiments/create":
            return 200, {"experiment_id": "7"}
        if call == "/runs/search":
            return 200, {"runs": [{"info": {"run_id": name}} for name in self.runs]} if self.runs else {}
        if call == "/runs/delete":
            del self.runs[request.json["run_id"]]
        elif call == "/runs/create":
            name = f"run{len(self.taken)}"
            self.runs[name] = {"tags": request.json["tags"], "params": [], "metrics": [], "status": "RUNNING"}
            return 200, {"run": {"info": {"run_id": name, "artifact_uri": f"mlflow-artifacts:/7/{name}/artifacts"}}}
        elif call == "/runs/log-batch":
            for kind in ("params", "metrics"):
                self.runs[request.json["run_id"]][kind] += request.json.get(kind, [])
            known = {
                each["key"]: each
                for each in [*self.runs[request.json["run_id"]]["tags"], *request.json.get("tags", [])]
            }
            self.runs[request.json["run_id"]]["tags"] = list(known.values())
        elif call == "/runs/update":
            self.runs[request.json["run_id"]]["status"] = request.json["status"]
        elif request.method == "PUT":
            self.files[request.path] = request.body
        return 200, {}


@contextmanager
def export_receiver(port: int = 0) -> Iterator[ExportReceiver]:
    """Listen until the end of the block."""
    receiver = ExportReceiver()

    def answer(request: Request) -> Reply:
        status, content = receiver.answer(request)
        return Reply.of(content, status)

    with listening(answer, port) as receiver.url:
        yield receiver
