"""A real API server over a real broker, for attacks on its open socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
import uvicorn

from api.main import create_app
from service.jobs.settings import Settings
from service.jobs.store import Store, StoreLimits


@dataclass(frozen=True)
class Service:
    """A server and its store; what its clients ask, they ask over the socket."""

    url: str
    settings: Settings
    store: Store

    def client(self, owner: str) -> httpx2.Client:
        """A client with a key of its own that may submit."""
        secret = self.store.keys.create(owner, ["submit"])[1]
        return httpx2.Client(base_url=self.url, headers={"Authorization": f"Bearer {secret}"}, timeout=120.0)


@contextmanager
def serving(settings: Settings) -> Iterator[Service]:
    """The API of these settings on a free port of the loopback."""
    store = Store.connect(settings.broker_url, settings.layout, StoreLimits.of(settings))
    app = create_app(settings, store)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    listening = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Service(f"http://127.0.0.1:{listening.getsockname()[1]}", settings, store)
    finally:
        app.state.context.hub.close_soon()
        server.should_exit = True
        thread.join(30)
        store.close()
    assert not thread.is_alive()


def wait_until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Until ``holds``; a machine that is busy may take long."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
