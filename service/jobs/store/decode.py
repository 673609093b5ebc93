"""Converts what Redis holds to records: hashes of strings become typed, frozen data."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import orjson

from service.jobs.launchers import LOCAL
from service.jobs.projects import DEFAULT_PROJECT
from service.jobs.records import HostShare, Job, JobPhase, ListedJob

_JSON_FIELDS = (
    "labels",
    "parallel",
    "spec",
    "placement",
    "progress",
    "result",
    "error",
    "parameters",
    "children",
    "allocation",
)
_TIME_FIELDS = ("created_at", "started_at", "ended_at")


def fields_of(flat: list[str]) -> dict[str, str]:
    """Return the dict behind a flat list of fields and values."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def moment(milliseconds: str | float) -> datetime:
    return datetime.fromtimestamp(float(milliseconds) / 1000, UTC)


def job(flat: list[str]) -> Job:
    """Return a job from its script view."""
    values = _values(flat)
    told = orjson.loads(fields_of(flat).get("phases", "[]"))
    return Job.model_validate({**values, "phases": _phases(told, values.get("ended_at"))})


def listed_job(flat: list[str]) -> ListedJob:
    """Return a job from its script view, which may leave out the spec."""
    return ListedJob.model_validate(_values(flat))


def _values(flat: list[str]) -> dict[str, Any]:
    fields = fields_of(flat)
    values: dict[str, Any] = {name: fields[name] for name in ("id", "kind", "name", "owner", "state")}
    values |= {name: orjson.loads(fields[name]) for name in _JSON_FIELDS if name in fields}
    values |= {name: moment(fields[name]) for name in _TIME_FIELDS if name in fields}
    values |= {name: int(fields[name]) for name in ("attempt", "priority")}
    values["sweep"] = fields.get("sweep")
    values["launcher"] = fields.get("launcher", LOCAL)
    values["project"] = fields.get("project", DEFAULT_PROJECT)
    values["shared_with"] = orjson.loads(fields.get("shared", "[]"))
    return {**values, "reason": reason_of(fields)}


def reason_of(fields: dict[str, str]) -> str | None:
    """Return why a job is where it is: what its last move was for, and what it waits for."""
    return "; ".join(fields[name] for name in ("reason", "waiting") if fields.get(name)) or None


def _phases(told: list[tuple[str, float]], ended_at: datetime | None) -> Iterator[JobPhase]:
    """Yield phases, each of which lasts until the next one begins. Their times may be those of two clocks."""
    ends = [*(began for _, began in told), None if ended_at is None else ended_at.timestamp()][1:]
    for (name, began), end in zip(told, ends, strict=True):
        seconds = None if end is None else max(end - began, 0.0)
        yield JobPhase(name=name, began_at=datetime.fromtimestamp(began, UTC), seconds=seconds)


def shares(text: str) -> tuple[HostShare, ...]:
    return tuple(HostShare.model_validate(share) for share in orjson.loads(text))
