"""Sends a job to an OpenTelemetry collector: OTLP over HTTP, as JSON (https://opentelemetry.io/docs/specs/otlp)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from api.exports.base import ExportedJob, Exporter, json_number, portions
from api.exports.server import ExportServer, required
from api.routes.metrics import Points

_MOST_POINTS = 2000
_SEVERITY = {"succeeded": (9, "INFO"), "cancelled": (13, "WARN"), "failed": (17, "ERROR")}


class OtlpExporter(Exporter):
    """Sends metrics and results as gauges by step, and one log record with parameters, artifacts and outcome."""

    def begin(self, told: ExportedJob, server: ExportServer | None) -> str:
        return ""

    def send(self, told: ExportedJob, server: ExportServer | None, mark: str, points: Mapping[str, Points]) -> str:
        for name, each in points.items():
            _send_gauge(told, server, name, (_point(value, when, step) for step, (when, value) in sorted(each.items())))
        return mark

    def end(self, told: ExportedJob, server: ExportServer | None, mark: str) -> str:
        for name, value in told.results().items():
            _send_gauge(told, server, f"result.{name}", iter([_point(value, told.now, None)]))
        records = [{"scope": {"name": "trivet"}, "logRecords": [_log_record(told)]}]
        _post(server, "/v1/logs", {"resourceLogs": [{"resource": _resource(told.facts()), "scopeLogs": records}]})
        return "" if server is None else server.url


def _resource(facts: Mapping[str, str]) -> dict[str, Any]:
    named = {f"trivet.{name}": value for name, value in facts.items()}
    return {"attributes": _attributes({"service.name": "trivet-job", "service.namespace": "trivet", **named})}


def _send_gauge(told: ExportedJob, server: ExportServer | None, name: str, points: Iterator[dict[str, Any]]) -> None:
    """Send the points of a metric, a bounded number in each request; its resource is the same from first to last."""
    for part in portions(points, _MOST_POINTS):
        scoped = [
            {"scope": {"name": "trivet"}, "metrics": [{"name": f"trivet.job.{name}", "gauge": {"dataPoints": part}}]}
        ]
        _post(
            server,
            "/v1/metrics",
            {"resourceMetrics": [{"resource": _resource(told.identity()), "scopeMetrics": scoped}]},
        )


def _point(value: float | None, when: float, step: int | None) -> dict[str, Any]:
    point = {"timeUnixNano": str(round(when * 1e9)), "asDouble": json_number(value)}
    return point if step is None else {**point, "attributes": [{"key": "step", "value": {"intValue": str(step)}}]}


def _log_record(told: ExportedJob) -> dict[str, Any]:
    job = told.job
    number, text = _SEVERITY[job.state]
    said = {f"spec.{name}": value for name, value in told.parameters().items()}
    said |= {f"result.{name}": str(value) for name, value in told.results().items()}
    said |= {f"result.{name}": value for name, value in told.findings().items()}
    said |= {f"artifact.{each.name}": each.sha256 for each in told.store.artifacts.list(job.id)}
    return {
        "timeUnixNano": str(round(told.now * 1e9)),
        "severityNumber": number,
        "severityText": text,
        "body": {"stringValue": f"job {job.id} {job.state}"},
        "attributes": _attributes(said),
    }


def _attributes(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in values.items()]


def _post(server: ExportServer | None, path: str, body: Mapping[str, Any]) -> None:
    required(server).send("POST", path, json=body).check()
