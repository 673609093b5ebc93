"""Measures an API process: its requests, its event loop and the disk below it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.server.loops import repeat
from service.jobs.monitoring.alerts import AlertStatus, evaluate
from service.jobs.monitoring.conditions import Moment
from service.jobs.monitoring.numbers import Meter, Numbers, Series
from service.jobs.settings import Settings
from service.jobs.store import Store, StoreUnavailable
from service.jobs.text import set_log_fields
from service.jobs.tracing import Tracing, set_current_traceparent, trace_id, valid_traceparent

log = logging.getLogger(__name__)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"
V1 = "/v1"
"""Prefix of all routes that need a key."""


@dataclass(frozen=True)
class MonitorSettings:
    """Periods of a process's measurements, in seconds."""

    lag_s: float = 0.5
    """Seconds between two measurements of the event loop."""
    add_s: float = 5.0
    """Seconds between two additions of its counts to those of all processes; a killed process loses this much."""


@dataclass
class Monitor:
    """Owns the counters of one API process. Now and then, before each scrape and at the end, it adds its counts
    to the broker's totals.
    """

    settings: Settings
    store: Store
    open_streams: Callable[[], int]
    tracing: Tracing
    every: MonitorSettings = MonitorSettings()
    meter: Meter = field(default_factory=Meter)
    _task: asyncio.Task[None] | None = None
    _added_at: float = 0.0

    def numbers(self) -> Numbers:
        """Return the values of all metrics. Raises :class:`StoreUnavailable`."""
        self.store.counts.add(self.meter)
        disk = shutil.disk_usage(self.settings.layout.root)
        return self.store.gauges.numbers() | {
            Series("trivet_data_free_bytes"): float(disk.free),
            Series("trivet_data_size_bytes"): float(disk.total),
            Series("trivet_event_streams"): float(self.open_streams()),
        }

    def alerts(self) -> list[AlertStatus]:
        """Return the present state of each alert. Raises :class:`StoreUnavailable`."""
        now = Moment(self.store.gauges.now_s(), self.numbers())
        return evaluate([each for each in self.store.samples.history() if each.at < now.at] + [now])

    def start(self) -> None:
        self._added_at = time.monotonic()
        self._task = asyncio.create_task(repeat(self._watch, self.every.add_s))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        with contextlib.suppress(StoreUnavailable):
            await asyncio.to_thread(self.store.counts.add, self.meter)
        await asyncio.to_thread(self.tracing.close)

    async def _watch(self) -> float:
        due = time.monotonic() + self.every.lag_s
        await asyncio.sleep(self.every.lag_s)
        self.meter.observe("trivet_event_loop_lag_seconds", max(0.0, time.monotonic() - due))
        if time.monotonic() - self._added_at >= self.every.add_s:
            self._added_at = time.monotonic()
            with contextlib.suppress(StoreUnavailable):  # the lag is measured all the same
                await asyncio.to_thread(self._report)
        return 0.0

    def _report(self) -> None:
        """Add this process's counts, and store the numbers if they are due; without a broker both wait."""
        self.store.counts.add(self.meter)
        if self.store.samples.is_due():
            self.store.samples.record(Moment(self.store.gauges.now_s(), self.numbers()))


class HttpMiddleware(ABC):
    """Handles HTTP requests; what else a server tells an application is passed on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return (self._handle if scope["type"] == "http" else self._app)(scope, receive, send)

    @abstractmethod
    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class RequestTimes(HttpMiddleware):
    """Measures the time of each request until its response begins, by route; a stream may last for hours."""

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        super().__init__(app)
        self._meter = meter

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()

        async def send_timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._observe(scope, message["status"], time.monotonic() - started)
            await send(message)

        await self._app(scope, receive, send_timed)

    def _observe(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else _OTHER
        self._meter.observe("trivet_request_seconds", seconds, method, _route_of(scope), str(status))


def _route_of(scope: Mapping[str, Any]) -> str:
    """Return the template of a request's route, such as ``/v1/jobs/{job_id}``, never the requested path. A
    route knows its path below its router, and only the router of V1 has a prefix.
    """
    template = getattr(scope.get("route"), "path", None)
    if template is None:
        return _OTHER
    below = scope["path"].startswith(f"{V1}/") and not template.startswith(f"{V1}/")
    return f"{V1}{template}" if below else str(template)


class Traces(HttpMiddleware):
    """Makes a span of each request below ``/v1``, without the contents of streams, as a child of the client's
    ``traceparent``.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        super().__init__(app)
        self._tracing = tracing

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(f"{V1}/"):
            await self._app(scope, receive, send)
            return
        given = valid_traceparent(Headers(scope=scope).get("traceparent", ""))
        with self._tracing.span(scope["method"], given, {"http.request.method": scope["method"]}) as span:
            followed = span.traceparent
            set_current_traceparent(followed)
            if followed is not None:
                set_log_fields(trace_id=trace_id(followed))

            async def send_traced(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.rename(f"{scope['method']} {_route_of(scope)}")
                    if message["status"] >= 500:
                        span.fail(str(message["status"]))
                await send(message)

            await self._app(scope, receive, send_traced)
