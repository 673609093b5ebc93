"""A service that answers every call of the command line with text of somebody's choice wherever there is text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from hostile_answers import audit_line, body, log_line, stream
from http_receiver import Reply, Request, listening


@dataclass
class Hostile:
    """Set ``text`` for what it says, ``refusal`` for a status with which it refuses every call, and ``key_expires`` for
    what each answer says of when the key expires.
    """

    url: str = ""
    text: str = ""
    refusal: int | None = None
    key_expires: str | None = None

    def answer(self, request: Request) -> Reply:
        headers = {} if self.key_expires is None else {"X-Trivet-Key-Expires": self.key_expires}
        reply = self._speak(request) if self.refusal is None else self._refuse(self.refusal)
        return reply._replace(headers=headers)

    def _refuse(self, status: int) -> Reply:
        problem: dict[str, object] = {"title": self.text, "status": status, "detail": f"{self.text}\n{self.text}"}
        if status == 422:
            problem["errors"] = [dict.fromkeys(("path", "message", "got", "expected"), self.text)]
        return Reply(status, json.dumps(problem).encode(), "application/problem+json")

    def _speak(self, request: Request) -> Reply:
        text, path = self.text, urlsplit(request.path).path
        if "text/event-stream" in request.headers.get("accept", ""):
            return Reply(content=stream(text), media_type="text/event-stream")
        if path.endswith("/logs"):
            return _line(log_line(text) if "format=jsonl" in request.path else text.replace("\n", " "))
        if path == "/v1/audit" and "format=jsonl" in request.path:
            return _line(audit_line(text))
        if "/artifacts/" in path:
            return Reply(content=b"bytes", media_type="application/octet-stream")
        if request.method == "DELETE" and "/share/" not in path:
            return Reply(204)
        return Reply.of(body(path, text))


def _line(text: str) -> Reply:
    return Reply(content=text.encode("utf-8", "replace") + b"\n", media_type="text/plain; charset=utf-8")


@contextmanager
def hostile_service() -> Iterator[Hostile]:
    service = Hostile()
    with listening(service.answer) as service.url:
        yield service
