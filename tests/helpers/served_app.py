"""An application on a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from waiting import eventually


@contextmanager
def served(app: FastAPI, port: int = 0) -> Iterator[tuple[str, uvicorn.Server]]:
    """Serve on a port of the loopback until the end of the block; yield URL and server."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=5)
    server, listening = uvicorn.Server(config), config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
    finally:
        app.state.context.hub.close_soon()
        server.should_exit = True
        thread.join(300)
    assert not thread.is_alive()
