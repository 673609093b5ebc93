"""Spans reach a real OTLP receiver; without its variables nothing of OpenTelemetry's SDK is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from otlp_receiver import OtlpReceiver

from service.jobs.tracing import tracing_for, valid_traceparent

ROOT = Path(__file__).parents[3]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_spans_and_their_children_are_received(collector: OtlpReceiver) -> None:
    tracing = tracing_for("test", os.environ)
    with tracing.span("outer", PARENT, {"job": "job_1"}, [PARENT]) as outer:
        tracing.record("inner", outer.traceparent, 10.0, 12.5, {"step": 3})
        outer.event("exception", 11.0, {"exception.type": "ValueError"})
        outer.fail("ValueError")
    tracing.close()
    (inner,), (outer_seen,) = collector.named("inner"), collector.named("outer")
    assert {inner.trace, outer_seen.trace} == {PARENT.split("-")[1]}
    assert (outer_seen.parent, inner.parent) == (PARENT.split("-")[2], outer_seen.id)
    assert (inner.start, inner.end) == (10_000_000_000, 12_500_000_000)
    assert (outer_seen.links, outer_seen.events, outer_seen.failed) == ((PARENT.split("-")[2],), ("exception",), True)
    assert (outer_seen.service, outer_seen.attributes) == ("trivet-test", {"job": "job_1"})


def test_an_exception_marks_its_span(collector: OtlpReceiver) -> None:
    tracing = tracing_for("test", os.environ)
    with pytest.raises(KeyError), tracing.span("broken", None, {}):
        raise KeyError("x")
    tracing.close()
    assert (collector.named("broken")[0].failed, collector.named("broken")[0].events) == (True, ("exception",))


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_nothing_is_traced_unless_that_is_asked_for(environment: dict[str, str]) -> None:
    tracing = tracing_for("test", environment)
    assert not tracing.is_on
    with tracing.span("x", None, {}) as span, tracing.span("y", PARENT, {}) as child:
        assert (span.traceparent, child.traceparent) == (None, PARENT)


@pytest.mark.slow
def test_without_the_variables_nothing_that_traces_is_imported() -> None:
    """The Redis client may import other parts of it, where it is installed."""
    script = (
        "import sys, api.main, workers.supervisor.attempt; "
        "print([n for n in sys.modules if n.startswith(('opentelemetry.sdk.trace', 'opentelemetry.exporter'))])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert ran.stdout.strip() == "[]"


@given(st.text(max_size=60))
def test_no_other_text_is_a_traceparent(text: str) -> None:
    assert valid_traceparent(text) is None


def test_an_empty_trace_is_none() -> None:
    assert valid_traceparent(PARENT) == PARENT
    assert valid_traceparent(PARENT.upper()) is None
    assert valid_traceparent(PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32)) is None
