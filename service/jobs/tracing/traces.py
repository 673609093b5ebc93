"""Traces a job from its request to its steps, for OpenTelemetry's collectors.

OpenTelemetry's own variables turn it on (``OTEL_EXPORTER_OTLP_ENDPOINT``, or that of traces alone); without them
nothing of its SDK is imported. A trace continues through W3C's ``traceparent``, which a client may send and the
job's record keeps.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol

logger = logging.getLogger(__name__)

Attributes = Mapping[str, str | int | float | bool]
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_current: ContextVar[str | None] = ContextVar("traceparent", default=None)


class TraceSpan(Protocol):
    """A timed piece of work under way."""

    @property
    def traceparent(self) -> str | None:
        """Return the parent of other spans; ``None`` if nothing is traced."""

    def rename(self, name: str) -> None:
        """Give the span another name."""

    def event(self, name: str, at_s: float, attributes: Attributes) -> None:
        """Add an event."""

    def fail(self, message: str) -> None:
        """Mark the span as failed."""


class Tracing(Protocol):
    """Makes spans. Times are Unix seconds; a parent and a link are given as ``traceparent``."""

    @property
    def is_on(self) -> bool:
        """Return whether spans are recorded."""

    def span(
        self, name: str, parent: str | None, attributes: Attributes, links: Sequence[str] = ()
    ) -> AbstractContextManager[TraceSpan]:
        """Begin a span, which ends with the context."""

    def record(self, name: str, parent: str | None, start_s: float, end_s: float, attributes: Attributes) -> None:
        """Enter a span that has ended."""

    def close(self) -> None:
        """Send what is still unsent."""


class _NoSpan:
    traceparent: str | None = None

    def rename(self, name: str) -> None:
        """Do nothing."""

    def event(self, name: str, at_s: float, attributes: Attributes) -> None:
        """Do nothing."""

    def fail(self, message: str) -> None:
        """Do nothing."""


class NoTracing:
    """Traces nothing, and costs nothing."""

    is_on = False

    @contextmanager
    def span(
        self, name: str, parent: str | None, attributes: Attributes, links: Sequence[str] = ()
    ) -> Iterator[TraceSpan]:
        yield _NoSpan()

    def record(self, name: str, parent: str | None, start_s: float, end_s: float, attributes: Attributes) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def tracing_for(service: str, environment: Mapping[str, str]) -> Tracing:
    """Return the tracing of a process of this name, as OpenTelemetry's variables say."""
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_disabled or exporter != "otlp" or not any(environment.get(name) for name in _ENDPOINTS):
        return NoTracing()
    try:
        from service.jobs.tracing.otlp import OtlpTracing  # noqa: PLC0415 - only where it is wanted
    except ModuleNotFoundError as missing:
        logger.warning("nothing is traced, because there is no %s: install trivet[otel]", missing.name)
        return NoTracing()
    return OtlpTracing(service)


def valid_traceparent(text: str) -> str | None:
    """Return a ``traceparent`` if it is one."""
    return text if _TRACEPARENT.fullmatch(text) else None


def trace_id(traceparent: str) -> str:
    """Return the trace that a ``traceparent`` belongs to."""
    return traceparent.split("-")[1]


def current_traceparent() -> str | None:
    """Return the span that this task works for, or the client's instead."""
    return _current.get()


def set_current_traceparent(traceparent: str | None) -> None:
    _current.set(traceparent)
