"""A server on loopback that answers by a function, until the end of a block."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple


class Request(NamedTuple):
    """What the server was sent. Names of headers are in lower case; a body is unpacked."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Reply(NamedTuple):
    status: int = 200
    content: bytes = b""
    media_type: str = "application/json"
    headers: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def of(cls, value: object, status: int = 200) -> Reply:
        return cls(status, json.dumps(value).encode())


Answer = Callable[[Request], Reply]


@contextmanager
def answering(server: HTTPServer) -> Iterator[str]:
    """Let a server answer from a thread of its own until the end of the block; yield its URL."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def listening(answer: Answer, port: int = 0) -> Iterator[str]:
    """Yield the URL to send to."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", "0")))
            if headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            reply = answer(Request(self.command, self.path, headers, body))
            self.send_response(reply.status)
            own = {"Content-Type": reply.media_type, "Content-Length": str(len(reply.content))}
            for name, value in (own | dict(reply.headers)).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.content)

        do_GET = do_PUT = do_PATCH = do_DELETE = do_POST  # noqa: N815 - the names of the base class

        def log_message(self, *_: object) -> None:
            return

    with answering(ThreadingHTTPServer(("127.0.0.1", port), Handler)) as url:
        yield url
