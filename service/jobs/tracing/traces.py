"""Traces a job from its request to its steps, for OpenTelemetry's collectors.

OpenTelemetry's own variables turn it on (``OTEL_EXPORTER_OTLP_ENDPOINT``, or that of traces alone); without them
nothing of its SDK is imported. A trace continues through W3C's ``traceparent``, which a client may send and the
job's record keeps.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

Attributes = Mapping[str, str | int | float | bool]
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROPAGATOR = TraceContextTextMapPropagator()
_current: ContextVar[str | None] = ContextVar("traceparent", default=None)


class TraceSpan:
    """A timed piece of work under way."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str | None:
        """Return the parent of other spans: this one, or the span's own parent if nothing is traced."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier.get("traceparent")

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def event(self, name: str, at_s: float, attributes: Attributes) -> None:
        self._span.add_event(name, attributes, _nanoseconds(at_s))

    def fail(self, message: str) -> None:
        self._span.set_status(trace.StatusCode.ERROR, message)


class Tracing:
    """Makes spans with a provider of its own, not the process-wide one, so no library's spans are sent; without a
    provider it records nothing. Times are Unix seconds; a parent and a link are given as ``traceparent``.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = trace.NoOpTracer() if provider is None else provider.get_tracer("trivet")

    @property
    def is_on(self) -> bool:
        """Return whether spans are recorded."""
        return self._provider is not None

    @contextmanager
    def span(
        self, name: str, parent: str | None, attributes: Attributes, links: Sequence[str] = ()
    ) -> Iterator[TraceSpan]:
        """Begin a span, which ends with the context."""
        linked = [trace.Link(trace.get_current_span(_context(link)).get_span_context()) for link in links]
        span = self._tracer.start_span(name, context=_context(parent), attributes=attributes, links=linked)
        try:
            yield TraceSpan(span)
        except Exception as error:
            span.record_exception(error)
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            span.end()

    def record(self, name: str, parent: str | None, start_s: float, end_s: float, attributes: Attributes) -> None:
        """Enter a span that has ended."""
        start = _nanoseconds(start_s)
        span = self._tracer.start_span(name, context=_context(parent), attributes=attributes, start_time=start)
        span.end(_nanoseconds(max(start_s, end_s)))

    def close(self) -> None:
        """Send what is still unsent."""
        if self._provider is not None:
            self._provider.shutdown()


def tracing_for(service: str, environment: Mapping[str, str]) -> Tracing:
    """Return the tracing of a process of this name, as OpenTelemetry's variables say."""
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_disabled or exporter != "otlp" or not any(environment.get(name) for name in _ENDPOINTS):
        return Tracing()
    try:
        return Tracing(_exporting_provider(service))
    except ModuleNotFoundError as missing:
        logger.warning("nothing is traced, because there is no %s: install trivet[otel]", missing.name)
        return Tracing()


def _exporting_provider(service: str) -> TracerProvider:
    """Return a provider that sends spans by OTLP over HTTP to the target of OpenTelemetry's variables."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - only where it is wanted
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    resource = Resource.create({"service.name": f"trivet-{service}", "service.namespace": "trivet"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def valid_traceparent(text: str) -> str | None:
    return text if _TRACEPARENT.fullmatch(text) else None


def trace_id(traceparent: str) -> str:
    return traceparent.split("-")[1]


def current_traceparent() -> str | None:
    """Return the span that this task works for, or the client's instead."""
    return _current.get()


def set_current_traceparent(traceparent: str | None) -> None:
    _current.set(traceparent)


def _context(traceparent: str | None) -> Context:
    return _PROPAGATOR.extract({} if traceparent is None else {"traceparent": traceparent}, Context())


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
