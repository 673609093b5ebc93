"""A collector on loopback that keeps the spans which it is sent by OTLP over HTTP, as protobuf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from http_receiver import Reply, Request, listening
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """One span, with the ids as hexadecimal digits."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    links: tuple[str, ...]
    events: tuple[str, ...]
    failed: bool


@dataclass
class OtlpReceiver:
    url: str
    spans: list[Received] = field(default_factory=list)

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    @property
    def variables(self) -> dict[str, str]:
        """What makes a process send its spans here."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Listen until the end of the block."""
    receiver = OtlpReceiver("")

    def answer(request: Request) -> Reply:
        receiver.spans.extend(_spans(ExportTraceServiceRequest.FromString(request.body)))
        return Reply(media_type="application/x-protobuf")

    with listening(answer) as receiver.url:
        yield receiver


def _spans(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Received(
                    service=service,
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    links=tuple(link.span_id.hex() for link in span.links),
                    events=tuple(event.name for event in span.events),
                    failed=span.status.code == 2,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
