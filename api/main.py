"""Builds the application."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Security
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from api import errors
from api.checker import Checker, CheckerSettings
from api.context import Context, attach, context_of
from api.middleware import Hardening, HostNames, known_names
from api.openapi import document
from api.routes import (
    artifacts,
    bounds,
    events,
    files,
    health,
    hosts,
    jobs,
    keys,
    kinds,
    logs,
    metrics,
    report,
    schedule,
    session,
    timeline,
)
from api.security import authenticated, session_cookie
from api.stream import Hub, HubSettings
from service.jobs.settings import Settings
from service.jobs.store import Store
from service.jobs.store.tail import StreamTail


def create_app(settings: Settings, store: Store | None = None) -> FastAPI:
    """Return the API and the dashboard over one broker and one data folder."""
    app = FastAPI(
        title="Trivet",
        version="1",
        description="Train, verify and compile-check models: jobs, their events and what came of them.",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        redirect_slashes=False,
    )
    connected = (
        store if store is not None else Store.connect(settings.broker_url, settings.layout, settings.store_limits)
    )
    hub = Hub(
        StreamTail.connect(settings.broker_url),
        connected.keys.ended,
        HubSettings(max_streams=settings.max_streams, max_streams_per_key=settings.max_streams_per_key),
    )
    attach(app, Context(settings, connected, hub, Checker(settings, CheckerSettings())))
    errors.install(app)
    app.include_router(_v1(settings))
    app.include_router(health.router)
    app.include_router(session.router)
    _mount_dashboard(app)
    document(app)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=settings.max_body_bytes)
    app.add_middleware(HostNames, names=known_names(settings))
    app.add_middleware(Hardening)
    return app


def _v1(settings: Settings) -> APIRouter:
    """Return the routes that need a key: the dependency sits on the router, so that no route can forget it."""
    router = APIRouter(prefix="/v1", dependencies=[Security(authenticated)])
    for resource in (
        jobs.router,
        events.router,
        metrics.router,
        logs.router,
        bounds.router,
        report.router,
        schedule.router,
        timeline.router,
        artifacts.router,
        hosts.router,
        kinds.router,
        keys.router,
        files.build_router(settings.max_file_bytes),
    ):
        router.include_router(resource)
    return router


def _mount_dashboard(app: FastAPI) -> None:
    from api.dashboard import mount  # noqa: PLC0415 - the pages are an application's last routes

    mount(app, signed_in=_has_session)


def _has_session(request: Request) -> bool:
    """Return whether pages may be shown; what is in them asks the API, which checks the session itself."""
    return session_cookie(request) is not None


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context = context_of(app)
    context.hub.start()
    context.checker.start()
    with _closing_streams_on_signals(context.hub.close_soon):
        yield
    await context.hub.stop()
    await context.checker.stop()


@contextmanager
def _closing_streams_on_signals(close: Callable[[], None]) -> Iterator[None]:
    """End open streams when the server is told to stop: it would wait for them for ever, as they never end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: FrameType | None) -> None:
        close()
        chained: Any = previous[signal.Signals(number)]
        if callable(chained):
            chained(number, frame)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
