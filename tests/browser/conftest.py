"""A real API on a loopback port, a real broker behind it, and a real browser in front."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn
from ensure_chromium import find_chromium
from fleet import Fleet
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright
from redis import Redis

from api.context import context_of
from api.main import create_app
from service.jobs.layout import DataLayout
from service.jobs.settings import Settings
from service.jobs.store import Store, StoreLimits

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENT = StoreLimits(lease_s=3600, heartbeat_s=3600)
"""Nobody renews or beats here; time must not end what a test runs."""


@dataclass
class Service:
    """The API, in a thread, on a port that it keeps when it is restarted."""

    settings: Settings
    store: Store
    port: int
    server: uvicorn.Server | None = None
    thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        app = create_app(self.settings, self.store)
        self.server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error", timeout_graceful_shutdown=2)
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        _until(lambda: self.server is not None and self.server.started)
        self._hub = context_of(app).hub

    def stop(self) -> None:
        assert self.server is not None
        assert self.thread is not None
        self._hub.close_soon()
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()


def _until(condition: object, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard")


@pytest.fixture(scope="session")
def service(broker: str, data_root: Path) -> Iterator[Service]:
    settings = Settings.model_validate({"data": data_root, "redis_url": broker})
    store = Store.connect(broker, settings.layout, PATIENT)
    service = Service(settings, store, _free_port())
    service.start()
    yield service
    service.stop()
    store.close()


@pytest.fixture
def key(redis: Redis, service: Service) -> str:
    """An admin key of an otherwise empty service."""
    _, secret = service.store.keys.create("admin", ("admin",))
    return secret


@pytest.fixture
def fleet(key: str, service: Service) -> Fleet:
    """Two hosts: eight GPUs and four CPU slots."""
    fleet = Fleet(service.store, DataLayout(service.settings.data))
    fleet.host("gpu-a", cuda=["NVIDIA H100 80GB HBM3"] * 8, cpu=0)
    fleet.host("cpu-a", cpu=4)
    return fleet


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One per module: while Playwright is open, its event loop keeps every other test from running its own."""
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium is installed; tests/ensure_chromium.py can install one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()


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


@pytest.fixture
def complaints() -> Complaints:
    return Complaints()


@pytest.fixture
def context(browser: Browser, service: Service) -> Iterator[BrowserContext]:
    with contextlib.closing(
        browser.new_context(base_url=service.url, viewport={"width": 1280, "height": 900}, color_scheme="light")
    ) as context:
        context.set_default_timeout(10_000)
        yield context


@pytest.fixture
def visitor(context: BrowserContext, complaints: Complaints, key: str) -> Iterator[Page]:
    """A page of somebody who is not signed in. The test fails when the browser complained about anything."""
    page = context.new_page()
    complaints.listen(page)
    yield page
    page.goto("about:blank")
    assert complaints.found == []


@pytest.fixture
def page(visitor: Page, context: BrowserContext, service: Service, key: str) -> Page:
    """A page of somebody who is signed in."""
    admin = service.store.keys.verify(key)
    assert admin is not None
    session = service.store.sessions.begin(admin)
    context.add_cookies(
        [
            {
                "name": "trivet_session",
                "value": session.cookie,
                "url": service.url,
                "httpOnly": True,
                "sameSite": "Strict",
            }
        ]
    )
    context.add_init_script(
        "if (location.protocol === 'http:' && !localStorage.getItem('trivet-session'))"
        f" localStorage.setItem('trivet-session', '{session.page}')"
    )
    return visitor
