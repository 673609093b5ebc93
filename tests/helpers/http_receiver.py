"""A server on loopback that hands what it is sent to a function, until the end of a block."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

Answer = Callable[[str, str, dict[str, str], bytes], tuple[int, str, bytes]]
"""``(method, path, headers, body)`` of a request to status, media type and body of its answer; names in lower case."""


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
            status, media_type, content = answer(self.command, self.path, headers, body)
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST  # noqa: N815 - the names of the base class

        def log_message(self, *_: object) -> None:
            return

    with answering(ThreadingHTTPServer(("127.0.0.1", port), Handler)) as url:
        yield url
