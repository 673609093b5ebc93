"""A service that answers every call of the command line with text of somebody's choice wherever there is text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from hostile_answers import audit_line, body, log_line, stream
from http_receiver import answering


class Hostile(ThreadingHTTPServer):
    """Set ``text`` for what it says, ``refusal`` for a status with which it refuses every call, and ``key_expires`` for
    what each answer says of when the key expires.
    """

    daemon_threads = True
    text: str = ""
    refusal: int | None = None
    key_expires: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hostile_service() -> Iterator[Hostile]:
    server = Hostile(("127.0.0.1", 0), _Handler)
    with answering(server):
        yield server


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

    do_PUT = do_PATCH = do_POST  # noqa: N815 - as the handler's base class finds them

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
            self._send(200, "text/event-stream", stream(text))
        elif path.endswith("/logs"):
            jsonl = "format=jsonl" in self.path
            self._send_line(log_line(text) if jsonl else text.replace("\n", " "))
        elif path == "/v1/audit" and "format=jsonl" in self.path:
            self._send_line(audit_line(text))
        elif "/artifacts/" in path:
            self._send(200, "application/octet-stream", b"bytes")
        elif self.command == "DELETE" and "/share/" not in path:
            self._send(204, "text/plain", b"")
        else:
            self._send(200, "application/json", json.dumps(body(path, text)).encode())

    def _send_line(self, line: str) -> None:
        self._send(200, "text/plain; charset=utf-8", line.encode("utf-8", "replace") + b"\n")

    def _send(self, status: int, media_type: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(content)))
        if self.server.key_expires is not None:
            self.send_header("X-Trivet-Key-Expires", self.server.key_expires)
        self.end_headers()
        self.wfile.write(content)
