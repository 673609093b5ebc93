"""A real API on a loopback port, a real broker behind it, and a real browser in front."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from dashboard_service import Complaints, Service
from ensure_chromium import find_chromium
from fleet import Fleet
from own_broker import own_broker
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright
from redis import Redis

from service.jobs.files import DataLayout
from service.jobs.settings import Settings
from service.jobs.store import Store, StoreLimits

__all__ = ["own_broker"]
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP rebound.example 127.0.0.1",  # a site whose name leads here
]
expect.set_options(timeout=300_000)
OPENED = pytest.StashKey[contextlib.ExitStack]()
BROWSER = pytest.StashKey[Browser]()
STATIC = Path(__file__).parents[2] / "api" / "dashboard" / "static"
PATIENT = StoreLimits(lease_s=3600, heartbeat_s=3600)
"""Nobody renews or beats here; time must not end what a test runs."""


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard")


@pytest.fixture(scope="session")
def service(broker: str, data_root: Path) -> Iterator[Service]:
    settings = Settings.model_validate({"data": data_root, "redis_url": broker})
    store = Store.connect(broker, settings.layout, PATIENT)
    service = Service(settings, store)
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
def browser(request: pytest.FixtureRequest) -> Browser:
    """One for all tests here that follow each other; see :func:`pytest_runtest_teardown`."""
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium is installed; tests/ensure_chromium.py can install one")
    opened = request.config.stash.setdefault(OPENED, contextlib.ExitStack())
    if BROWSER not in request.config.stash:
        playwright = opened.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        request.config.stash[BROWSER] = opened.enter_context(contextlib.closing(browser))
    return request.config.stash[BROWSER]


@pytest.fixture(scope="module")
def bench(browser: Browser) -> Iterator[Page]:
    """A page of an origin that has the modules as they lie in the sources, and no service behind it."""

    def answer(route: Route) -> None:
        path = STATIC.parent / urlsplit(route.request.url).path.lstrip("/")
        if path.is_file():
            route.fulfill(path=path, content_type="text/javascript")
        else:
            route.fulfill(body="<!doctype html>", content_type="text/html")

    with contextlib.closing(browser.new_context(base_url="http://modules.test")) as context:
        context.route("**/*", answer)
        page = context.new_page()
        page.goto("/")
        yield page


@pytest.fixture(scope="module")
def run(bench: Page) -> Any:
    """Calls an exported function of a module below ``static/lib`` with JSON arguments."""

    def call(module: str, function: str, *arguments: Any) -> Any:
        return bench.evaluate(
            "async ([path, name, given]) => (await import(path))[name](...given)",
            [f"/static/lib/{module}.js", function, list(arguments)],
        )

    return call


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close the browser before any other test: while Playwright is open, its event loop lets no other one run."""
    stash = item.config.stash
    if BROWSER in stash and (nextitem is None or not nextitem.get_closest_marker("browser")):
        stash[OPENED].close()
        del stash[BROWSER]


@pytest.fixture
def complaints() -> Complaints:
    return Complaints()


@pytest.fixture
def context(browser: Browser, service: Service) -> Iterator[BrowserContext]:
    with contextlib.closing(
        browser.new_context(base_url=service.url, viewport={"width": 1280, "height": 900}, color_scheme="light")
    ) as context:
        context.set_default_timeout(300_000)
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
