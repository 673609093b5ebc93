"""Makes a run of a job on an MLflow tracking server, by its REST interface
(https://mlflow.org/docs/latest/api_reference/rest-api.html).

It does not use the client library, which would resolve the server's name again and could reach a forbidden address.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, BinaryIO
from urllib.parse import quote

from api.exports.base import ExportedJob, Exporter, RunGoneError, json_number, portions
from api.exports.server import Answer, ExportFailed, ExportServer, required
from api.routes.metrics import Points
from service.jobs.records import Job

_API = "/api/2.0/mlflow"
_MOST_METRICS, _MOST_OTHERS = 1000, 100
"""Most metrics, and parameters or tags, of one request, by MLflow's own limits."""
_LONGEST_VALUE, _LONGEST_KEY = 500, 250
_LARGEST_FILE = 1 << 30
_CHUNK = 1 << 20
_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_JOB_TAG = "trivet.job"
_PROXIED = "mlflow-artifacts:"


class MlflowExporter(Exporter):
    """Makes one run for each job, in the experiment ``trivet/PROJECT``: spec fields are parameters, results metrics."""

    def begin(self, told: ExportedJob, server: ExportServer | None) -> str:
        tracking = _Tracking(required(server))
        experiment = tracking.experiment(f"trivet/{told.job.project}")
        tracking.delete_runs_of(told.job.id, experiment)
        run = tracking.create_run(told, experiment)
        run_id, place = _inner(run, "info", "run_id"), _inner(run, "info", "artifact_uri")
        tracking.log_parameters(run_id, told)
        return json.dumps({"run": run_id, "experiment": experiment, "place": place})

    def send(self, told: ExportedJob, server: ExportServer | None, mark: str, points: Mapping[str, Points]) -> str:
        _Tracking(required(server)).log_metrics(json.loads(mark)["run"], _metrics(points))
        return mark

    def end(self, told: ExportedJob, server: ExportServer | None, mark: str) -> str:
        known, tracking = json.loads(mark), _Tracking(server := required(server))
        tracking.log_outcome(known["run"], told)
        tracking.upload(known["place"], told)
        tracking.end(known["run"], told.job)
        return f"{server.url.rstrip('/')}/#/experiments/{known['experiment']}/runs/{known['run']}"


class _Tracking:
    def __init__(self, server: ExportServer) -> None:
        self.server = server

    def experiment(self, name: str) -> str:
        """Return the id of an experiment, which is created if it is missing."""
        found = self.server.send("GET", f"{_API}/experiments/get-by-name", query={"experiment_name": name})
        if found.status == 404:
            return str(self._post("experiments/create", {"name": name}, "experiment_id"))
        return _inner(_read(found, "experiment"), "experiment_id")

    def delete_runs_of(self, job_id: str, experiment: str) -> None:
        """Delete earlier exports of the job, whole or partial."""
        asked = {"experiment_ids": [experiment], "filter": f"tags.`{_JOB_TAG}` = '{job_id}'", "max_results": 100}
        for run in self._post("runs/search", asked, "runs", default=[]):
            self._post("runs/delete", {"run_id": _inner(run, "info", "run_id")})

    def create_run(self, told: ExportedJob, experiment: str) -> Any:
        begun = told.job.started_at or told.job.created_at
        asked = {
            "experiment_id": experiment,
            "run_name": told.job.name,
            "start_time": _milliseconds(begun),
            "tags": _tags(told),
        }
        return self._post("runs/create", asked, "run")

    def log_parameters(self, run_id: str, told: ExportedJob) -> None:
        for params in portions(iter(_pairs(told.parameters())), _MOST_OTHERS):
            self._log(run_id, params=params)

    def log_metrics(self, run_id: str, metrics: Iterator[dict[str, Any]]) -> None:
        """Log metrics; the server keeps one of two that are alike in name, step, time and value."""
        for part in portions(metrics, _MOST_METRICS):
            self._log(run_id, metrics=part)

    def log_outcome(self, run_id: str, told: ExportedJob) -> None:
        """Log the results at the last step, and tags as they are at the end."""
        at = round(told.now * 1000)
        results = ((f"result.{name}", value) for name, value in told.results().items())
        self.log_metrics(run_id, (_metric(name, value, at, told.last_step) for name, value in results))
        for tags in portions(iter(_tags(told)), _MOST_OTHERS):
            self._log(run_id, tags=tags)

    def _log(self, run_id: str, **what: Sequence[dict[str, Any]]) -> None:
        answer = self.server.send("POST", f"{_API}/runs/log-batch", json={"run_id": run_id, **what})
        if answer.status == 404:
            raise RunGoneError(f"the server answered {answer.shown}")
        answer.check()

    def upload(self, place: str, told: ExportedJob) -> None:
        """Upload artifacts if the server stores them itself; other stores need their own credentials."""
        if not place.startswith(_PROXIED):
            return
        folder = place.removeprefix(_PROXIED).lstrip("/")
        for name, size, content in told.files(_LARGEST_FILE):
            path = "/".join(quote(part, safe="") for part in f"{folder}/{name}".split("/"))
            answer = self.server.send(
                "PUT",
                f"/api/2.0/mlflow-artifacts/artifacts/{path}",
                content=_chunks(content),
                headers={"content-length": str(size), "content-type": "application/octet-stream"},
            )
            answer.check()

    def end(self, run_id: str, job: Job) -> None:
        ended = job.ended_at or job.created_at
        self._post("runs/update", {"run_id": run_id, "status": _STATUS[job.state], "end_time": _milliseconds(ended)})

    def _post(self, call: str, body: Mapping[str, Any], wanted: str | None = None, default: Any = None) -> Any:
        answer = self.server.send("POST", f"{_API}/{call}", json=body)
        answer.check()
        return None if wanted is None else _read(answer, wanted, default)


def _tags(told: ExportedJob) -> list[dict[str, str]]:
    facts = {f"trivet.{name}": value for name, value in told.facts().items()}
    return _pairs(facts | {f"trivet.result.{name}": value for name, value in told.findings().items()})


def _metrics(points: Mapping[str, Points]) -> Iterator[dict[str, Any]]:
    for name, each in points.items():
        for step, (when, value) in sorted(each.items()):
            yield _metric(name, value, round(when * 1000), step)


def _metric(name: str, value: float | None, at: int, step: int) -> dict[str, Any]:
    return {"key": _key(name), "value": json_number(value), "timestamp": at, "step": step}


def _pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": _key(name), "value": value[:_LONGEST_VALUE]} for name, value in values.items()]


def _key(name: str) -> str:
    """Return a name that MLflow accepts: letters, digits and some signs."""
    return "".join(each if each.isascii() and (each.isalnum() or each in "_-. /") else "_" for each in name)[
        :_LONGEST_KEY
    ]


def _chunks(content: BinaryIO) -> Iterator[bytes]:
    while chunk := content.read(_CHUNK):
        yield chunk


def _read(answer: Answer, wanted: str, default: Any = None) -> Any:
    """Return a field of an answer. Raises :class:`ExportFailed` for any answer that is not MLflow's."""
    answer.check()
    try:
        return json.loads(answer.body).get(wanted, default) if default is not None else json.loads(answer.body)[wanted]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportFailed(f"not an answer of MLflow: {answer.shown}") from error


def _inner(found: Any, *path: str) -> str:
    """Return a text in a part of an answer. Raises :class:`ExportFailed` if that is no part of MLflow's."""
    value = found
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, str):
        raise ExportFailed(f"not an answer of MLflow: expected {'.'.join(path)} in {str(found)[:200]!r}")
    return value


def _milliseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
