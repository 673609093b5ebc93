"""Sends a job to an OpenTelemetry collector: OTLP over HTTP, as JSON (https://opentelemetry.io/docs/specs/otlp)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any

from api.exports.base import ExportedJob, json_number
from api.exports.server import ExportFailed, ExportServer

_MOST_POINTS = 2000
_SEVERITY = {"succeeded": (9, "INFO"), "cancelled": (13, "WARN"), "failed": (17, "ERROR")}


class OtlpExporter:
    """Sends metrics and results as gauges by step, and one log record with parameters, artifacts and outcome."""

    def export(self, told: ExportedJob, server: ExportServer | None) -> str:
        if server is None:
            raise ExportFailed("no server is named")
        resource = {"attributes": _attributes(_resource(told))}
        for metrics in _requests(told):
            scoped = [{"scope": {"name": "trivet"}, "metrics": metrics}]
            _post(server, "/v1/metrics", {"resourceMetrics": [{"resource": resource, "scopeMetrics": scoped}]})
        records = [{"scope": {"name": "trivet"}, "logRecords": [_log_record(told)]}]
        _post(server, "/v1/logs", {"resourceLogs": [{"resource": resource, "scopeLogs": records}]})
        return server.url


def _resource(told: ExportedJob) -> dict[str, str]:
    facts = {f"trivet.{name}": value for name, value in told.facts().items()}
    return {"service.name": "trivet-job", "service.namespace": "trivet", **facts}


def _requests(told: ExportedJob) -> Iterator[list[dict[str, Any]]]:
    """Yield metrics for one request each, of a bounded number of points."""
    for name, points in _series(told):
        while part := list(islice(points, _MOST_POINTS)):
            yield [{"name": f"trivet.job.{name}", "gauge": {"dataPoints": part}}]


def _series(told: ExportedJob) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    for name, points in told.metrics().items():
        yield name, (_point(value, when, step) for step, (when, value) in points.items())
    at = _end_time(told).timestamp()
    for name, value in told.results().items():
        yield f"result.{name}", iter([_point(value, at, None)])


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
        "timeUnixNano": str(round(_end_time(told).timestamp() * 1e9)),
        "severityNumber": number,
        "severityText": text,
        "body": {"stringValue": f"job {job.id} {job.state}"},
        "attributes": _attributes(said),
    }


def _attributes(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in values.items()]


def _end_time(told: ExportedJob) -> datetime:
    return told.job.ended_at or told.job.created_at


def _post(server: ExportServer, path: str, body: Mapping[str, Any]) -> None:
    answer = server.send("POST", path, json=body)
    if not answer.is_success:
        raise ExportFailed(f"the collector answered {answer.shown}")
