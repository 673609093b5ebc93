"""Traces a job from its request to its steps."""

from service.jobs.tracing.traces import (
    Attributes,
    TraceSpan,
    Tracing,
    current_traceparent,
    set_current_traceparent,
    trace_id,
    tracing_for,
    valid_traceparent,
)

__all__ = [
    "Attributes",
    "TraceSpan",
    "Tracing",
    "current_traceparent",
    "set_current_traceparent",
    "trace_id",
    "tracing_for",
    "valid_traceparent",
]
