"""A server on loopback that answers what the client of Weights & Biases asks: GraphQL, and streams of lines."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from http_receiver import Reply, Request, listening

_STREAM = re.compile(r"/files/team/([^/]+)/([^/]+)/file_stream")


@dataclass
class KeptRun:
    """What the server has of a run: by W&B's own names, as far as an export writes them."""

    id: str
    project: str
    name: str = ""
    kind: str = ""
    group: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return step and value of each point of a metric, in the order of arrival."""
        return [(row["trivet/step"], row[name]) for row in self.rows if name in row]

    @property
    def bucket(self) -> dict[str, Any]:
        project = {"id": "project", "name": self.project, "entity": {"id": "entity", "name": "team"}}
        config = {name: {"value": value} for name, value in self.config.items()}
        return {
            "id": f"bucket-{self.id}",
            "name": self.id,
            "displayName": self.name,
            "config": json.dumps(config),
            "summaryMetrics": json.dumps(self.summary),
            "project": project,
            "historyLineCount": len(self.rows),
            "historyTail": json.dumps([json.dumps(row) for row in self.rows[-1:]]),
            "eventsTail": "[]",
            "logLineCount": 0,
            "eventsLineCount": 0,
            "wandbConfig": json.dumps({"t": self.config.get("_wandb", {}).get("t")}),
            "tags": [],
        }


@dataclass
class WandbReceiver:
    """Keeps what it gets. Takes requests with ``key`` alone, and no lines while it ``refuses_streams``."""

    key: str
    url: str = ""
    refuses_streams: bool = False
    runs: dict[str, KeptRun] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str, authorization: str, body: bytes) -> tuple[int, dict[str, Any]]:
        self.asked.append(path)
        if authorization != "Basic " + base64.b64encode(f"api:{self.key}".encode()).decode():
            return 401, {"errors": [{"message": "user is not logged in"}]}
        if path == "/graphql":
            return 200, {"data": self._query(json.loads(body))}
        if (found := _STREAM.fullmatch(path)) and self.refuses_streams:
            return 403, {"error": "not yours"}
        if found:
            self._stream(self.runs[found[2]], json.loads(body))
            return 200, {}
        return 404, {}

    def _query(self, asked: dict[str, Any]) -> dict[str, Any]:
        given = asked["variables"]
        if asked["operationName"] in ("RunResumeStatus", "Rows"):
            known = self.runs.get(given["name"])
            entity = {"id": "entity", "name": "team"}
            bucket = None if known is None else known.bucket
            return {"model": {"id": "m", "name": given["project"], "entity": entity, "bucket": bucket}}
        if asked["operationName"] == "UpsertBucket":
            is_new = given["name"] not in self.runs
            run = self.runs.setdefault(given["name"], KeptRun(given["name"], given["project"]))
            run.name, run.kind = given["displayName"] or run.name, given["jobType"] or run.kind
            run.group = given["groupName"] or run.group
            run.config = {name: each["value"] for name, each in json.loads(given["config"] or "{}").items()}
            return {"upsertBucket": {"bucket": run.bucket, "inserted": is_new}}
        if asked["operationName"] == "CreateRunFiles":  # none is wanted
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}}
        return {}

    def _stream(self, run: KeptRun, sent: dict[str, Any]) -> None:
        for name, lines in sent.get("files", {}).items():
            rows = [json.loads(line) for line in lines["content"]]
            if name == "wandb-history.jsonl":
                run.rows[lines["offset"] :] = rows
            elif name == "wandb-summary.json":
                run.summary = rows[-1]
        run.exit_code = sent["exitcode"] if sent.get("complete") else None


@contextmanager
def wandb_receiver(key: str, port: int = 0) -> Iterator[WandbReceiver]:
    """Listen until the end of the block."""
    receiver = WandbReceiver(key)

    def answer(request: Request) -> Reply:
        status, content = receiver.answer(request.path, request.headers.get("authorization", ""), request.body)
        return Reply.of(content, status)

    with listening(answer, port) as receiver.url:
        yield receiver
