"""The dashboard's service in a thread, and what a browser has against its pages."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import uvicorn
from playwright.sync_api import ConsoleMessage, Page, expect

from api.callers import context_of
from api.main import create_app
from service.jobs.settings import Settings
from service.jobs.store import Store


@dataclass
class Service:
    """The API, in a thread, on a port that it keeps when it is restarted."""

    settings: Settings
    store: Store
    port: int = 0
    server: uvicorn.Server | None = None
    thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        app = create_app(self.settings, self.store)
        config = uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error", timeout_graceful_shutdown=2)
        self.server, listening = uvicorn.Server(config), config.bind_socket()
        self.port = listening.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()
        _until(lambda: self.server is not None and self.server.started)
        self._hub = context_of(app).hub

    def stop(self) -> None:
        assert self.server is not None
        assert self.thread is not None
        self._hub.close_soon()
        self.server.should_exit = True
        self.thread.join(300)
        assert not self.thread.is_alive()


@dataclass
class Complaints:
    """What the browser had against a page: CSP violations, errors, failed requests of its own files."""

    found: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()
    """Parts of messages that a test provokes."""

    def listen(self, page: Page) -> None:
        page.on("console", self._said)
        page.on("pageerror", lambda error: self._note(f"uncaught: {error}"))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self._note(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def _note(self, text: str) -> None:
        if not any(part in text for part in self.expected):
            self.found.append(text)


def _until(condition: object, within_s: float = 300.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def shown(page: Page, path: str) -> None:
    """Open a page and wait until its content is there."""
    page.goto(path)
    expect(page.locator("main h1").first).to_be_visible()
    expect(page.locator(".loading")).to_have_count(0)
