"""Builds the application."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Security
from fastapi.routing import APIRoute
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from api.callers import AuditQueue, Context, attach, authenticated, context_of, session_cookie
from api.deliveries import WebhookSender
from api.exports.sender import JobExports
from api.front import (
    ExpensiveAnswers,
    Hardening,
    HeadRequests,
    PlainHeads,
    PlainRoutes,
    RequestIds,
    errors,
    known_names,
)
from api.offload import Apart, Checker, CheckerSettings, FairTurns
from api.openapi import document
from api.requests import refuse_ignored
from api.routes import (
    accounts,
    alerts,
    artifacts,
    audit,
    batches,
    deletions,
    drafts,
    events,
    files,
    health,
    hosts,
    jobs,
    keys,
    kinds,
    logs,
    metrics,
    projects,
    queue,
    report,
    schedule,
    session,
    sign_in,
    timeline,
    tree,
    webhooks,
)
from api.server import V1, Monitor, RequestTimes, Traces, repeat
from api.sign_in.provider import OpenIdProvider, RelyingParty
from api.streams import Hub, HubSettings
from service.jobs.settings import Settings
from service.jobs.store import BrokerTimeouts, Store
from service.jobs.store.tail import StreamTail
from service.jobs.tracing import Tracing, tracing_for
from service.linux import handle_signals

_BROKER_AWAY_S = 2.0
"""Pause before the broker is asked again."""
_EXPIRE_EVERY_S = 3600.0
"""The pause between two searches for unused uploads."""


def connect(settings: Settings) -> Store:
    """Return the store of an API process, whose requests outlast a restart of the broker."""
    timeouts = BrokerTimeouts(outage_s=settings.broker_wait_s)
    return Store.connect(settings.broker_url, settings.layout, settings.store_limits, timeouts)


def create_app(settings: Settings, store: Store | None = None, apart: Apart | None = None) -> FastAPI:
    """Return the API and the dashboard over one broker and one data folder. ``apart`` is the process that makes its
    expensive answers; without one, this process does.
    """
    app = _application(settings, store, _lifespan, tracing_for("api", os.environ), apart)
    connected, monitor = context_of(app).store, context_of(app).monitor
    turns = FairTurns(settings.max_reads_per_key)
    app.add_middleware(ExpensiveAnswers, store=connected, turns=turns, apart=apart)
    app.add_middleware(PlainRoutes, store=connected, handlers=app.exception_handlers)
    app.add_middleware(HeadRequests)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=settings.max_body_bytes)
    app.add_middleware(PlainHeads, names=known_names(settings))
    app.add_middleware(Hardening)
    app.add_middleware(RequestTimes, meter=monitor.meter)
    app.add_middleware(Traces, tracing=monitor.tracing)
    app.add_middleware(RequestIds)
    return app


def create_app_apart(settings: Settings, store: Store) -> FastAPI:
    """Return what makes the expensive answers of such an API, behind it in a process of its own."""
    app = _application(settings, store, _lifespan_apart, Tracing())
    app.add_middleware(Hardening)
    app.add_middleware(Traces, tracing=Tracing())
    app.add_middleware(RequestIds)
    return app


def _application(
    settings: Settings,
    store: Store | None,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    tracing: Tracing,
    apart: Apart | None = None,
) -> FastAPI:
    """Return the routes over what they need."""
    app = FastAPI(
        title="Trivet",
        version="1",
        description="Train, verify and compile-check models: jobs, their events and their results.",
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    attach(app, _context(settings, store or connect(settings), tracing, apart))
    errors.install(app)
    app.include_router(_v1(settings))
    app.include_router(health.router)
    app.include_router(session.router)
    app.include_router(sign_in.router)
    _mount_dashboard(app, settings)
    app.webhooks.include_router(webhooks.callbacks)
    document(app)
    return app


def _context(settings: Settings, store: Store, tracing: Tracing, apart: Apart | None) -> Context:
    """Return what lives as long as the application."""
    probe = Store.connect(settings.broker_url, settings.layout, settings.store_limits)
    hub = Hub(
        StreamTail.connect(settings.broker_url, outage_s=settings.broker_wait_s),
        store.keys.ended,
        HubSettings(max_streams=settings.max_streams, max_streams_per_key=settings.max_streams_per_key),
    )
    return Context(
        settings=settings,
        store=store,
        probe=probe,
        hub=hub,
        checker=Checker(settings, CheckerSettings()),
        provider=_provider(settings),
        monitor=Monitor(settings, probe, lambda: hub.open_streams, tracing),
        webhooks=WebhookSender(settings, probe),
        audit_queue=AuditQueue(store.audit),
        apart=apart,
    )


def _operation_id(route: APIRoute) -> str:
    """Return the name of an operation: that of its function, which generated clients then use."""
    return route.name


def _v1(settings: Settings) -> APIRouter:
    """Return the routes that need a key. The dependencies are on the router, so that no route can forget them."""
    router = APIRouter(prefix=V1, dependencies=[Security(authenticated), Depends(refuse_ignored)])
    for resource in (
        jobs.router,
        batches.router,
        deletions.router,
        drafts.router,
        queue.router,
        events.router,
        metrics.router,
        logs.router,
        tree.router,
        report.router,
        schedule.router,
        timeline.router,
        artifacts.router,
        hosts.router,
        alerts.router,
        kinds.router,
        keys.router,
        accounts.router,
        audit.router,
        projects.router,
        webhooks.router,
        files.build_router(settings.max_file_bytes),
    ):
        router.include_router(resource)
    return router


def _provider(settings: Settings) -> OpenIdProvider | None:
    if settings.oidc_issuer is None or settings.oidc_client_id is None:
        return None
    secret = settings.oidc_client_secret
    return OpenIdProvider(
        RelyingParty(
            issuer=settings.oidc_issuer,
            client_id=settings.oidc_client_id,
            client_secret=None if secret is None else secret.get_secret_value(),
            scopes=settings.oidc_scopes,
        )
    )


def _mount_dashboard(app: FastAPI, settings: Settings) -> None:
    from api.dashboard import mount  # noqa: PLC0415 - the pages are an application's last routes

    mount(app, signed_in=_has_session, provider=settings.oidc_name if settings.oidc_issuer else None)


def _has_session(request: Request) -> bool:
    """Return whether pages may be shown; their contents come from the API, which checks the session itself."""
    return session_cookie(request) is not None


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context = context_of(app)
    context.hub.start()
    context.checker.start()
    housekeeping = [asyncio.create_task(_adopt(context.probe)), asyncio.create_task(_expire_uploads(context.store))]
    context.webhooks.start()
    exports = JobExports(context.settings, context.probe)
    exports.start()
    context.monitor.start()
    with _closing_streams_on_signals(context.hub.close_soon):
        yield
    for task in housekeeping:
        task.cancel()
    if context.apart is not None:
        await context.apart.stop()
    await context.webhooks.stop()
    await exports.stop()
    await context.hub.stop()
    await context.checker.stop()
    await context.monitor.stop()
    await context.store.client.leave_loop()
    context.probe.close()


@asynccontextmanager
async def _lifespan_apart(app: FastAPI) -> AsyncIterator[None]:
    context = context_of(app)
    yield
    await context.hub.tail.close()
    await context.checker.stop()
    await context.store.client.leave_loop()
    context.probe.close()


async def _adopt(store: Store) -> None:
    """Upgrade the store's data from an older version as soon as the broker answers."""
    await repeat(lambda: asyncio.to_thread(store.jobs.adopt), _BROKER_AWAY_S)


async def _expire_uploads(store: Store) -> None:
    """Delete unused uploads now and then."""

    async def expire() -> float:
        return 0.0 if await asyncio.to_thread(store.files.expire) else _EXPIRE_EVERY_S

    await repeat(expire, _EXPIRE_EVERY_S)


@contextmanager
def _closing_streams_on_signals(close: Callable[[], None]) -> Iterator[None]:
    """End open streams when the server is told to stop; they never end by themselves, so it would wait for
    ever. SIGHUP, which the server does not handle, stops it like SIGTERM: requests that have begun are
    answered.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

    def handle(number: int, frame: FrameType | None) -> None:
        close()
        ends_as = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        chained: Any = previous[ends_as]
        if callable(chained):
            chained(ends_as, frame)

    with handle_signals(handle, *previous):
        yield
