"""A receiver of webhooks on the loopback, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from http_receiver import answering


@dataclass
class Receiver:
    """Answers each request with the next of ``answers``, and the last of them from then on."""

    answers: list[int] = field(default_factory=lambda: [204])
    taken: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    def answer(self, headers: dict[str, str], body: bytes) -> int:
        self.taken.append((headers, body))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver in a thread."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = receiver.answer({name.lower(): value for name, value in self.headers.items()}, body)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", f"{receiver.url}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        receiver.url = f"{url}/hook"
        yield receiver
