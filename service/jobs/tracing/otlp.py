"""Makes spans with OpenTelemetry's SDK, and sends them by OTLP over HTTP to the target of its variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.jobs.tracing.traces import Attributes, TraceSpan

_PROPAGATOR = TraceContextTextMapPropagator()


class OtlpTracing:
    """Uses its own provider, not the process-wide one, so no library's traces are sent."""

    is_on = True

    def __init__(self, service: str) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": f"trivet-{service}", "service.namespace": "trivet"})
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("trivet")

    @contextmanager
    def span(
        self, name: str, parent: str | None, attributes: Attributes, links: Sequence[str] = ()
    ) -> Iterator[TraceSpan]:
        span = self._tracer.start_span(
            name,
            context=_context(parent),
            attributes=attributes,
            links=[trace.Link(trace.get_current_span(_context(link)).get_span_context()) for link in links],
        )
        try:
            yield _OtlpSpan(span)
        except Exception as error:
            span.record_exception(error)
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            span.end()

    def record(self, name: str, parent: str | None, start_s: float, end_s: float, attributes: Attributes) -> None:
        span = self._tracer.start_span(
            name, context=_context(parent), attributes=attributes, start_time=_nanoseconds(start_s)
        )
        span.end(_nanoseconds(max(start_s, end_s)))

    def close(self) -> None:
        self._provider.shutdown()


class _OtlpSpan:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str | None:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier.get("traceparent")

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def event(self, name: str, at_s: float, attributes: Attributes) -> None:
        self._span.add_event(name, attributes, _nanoseconds(at_s))

    def fail(self, message: str) -> None:
        self._span.set_status(trace.StatusCode.ERROR, message)


def _context(traceparent: str | None) -> Context:
    return _PROPAGATOR.extract({} if traceparent is None else {"traceparent": traceparent}, Context())


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
