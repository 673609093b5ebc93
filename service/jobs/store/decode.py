"""Converts the data of Redis to records: hashes of strings become typed, frozen data; and values to JSON for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import orjson

from service.jobs.records import HostShare, Job, JobPhase, ListedJob, TorchUsed


def fields_of(flat: list[str]) -> dict[str, str]:
    """Return the dict behind a flat list of fields and values."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def json_of(value: object) -> str:
    return orjson.dumps(value).decode()


def now() -> datetime:
    """Return the time of day as records keep it, in whole milliseconds."""
    return moment(round(time.time() * 1000))


def moment(milliseconds: str | float) -> datetime:
    return datetime.fromtimestamp(float(milliseconds) / 1000, UTC)


_READ: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("id", "kind", "name", "owner", "state", "sweep", "launcher", "project"), str),
    **dict.fromkeys(("labels", "parallel", "placement", "progress", "result", "error"), orjson.loads),
    **dict.fromkeys(("parameters", "allocation", "shared", "spec", "children", "computed_by"), orjson.loads),
    **dict.fromkeys(("created_at", "started_at", "ended_at"), moment),
    **dict.fromkeys(("attempt", "priority"), int),
}
"""How the fields of a record become those of a job."""
_READ_BY_SCRIPTS = ("reason", "shape", "avoid", "allocating", "queued_at")
LISTED_FIELDS = (*(name for name in _READ if name not in ("spec", "children")), *_READ_BY_SCRIPTS)
"""The fields of a record that ``brief_view`` in ``lua/lib/jobs.lua`` reads: those that lists show, and those from
which they follow.
"""


def job(flat: list[str]) -> Job:
    """Return a job from its script view."""
    values = _values(flat)
    fields = fields_of(flat)
    told = tuple(_phases(orjson.loads(fields.get("phases", "[]")), values.get("ended_at")))
    torch = TorchUsed.of(orjson.loads(fields.get("versions", "{}")))
    return Job.model_validate({**values, "phases": told, "torch": torch})


def listed_job(flat: list[str]) -> ListedJob:
    """Return a job from its script view, which may leave out the spec."""
    return ListedJob.model_validate(_values(flat))


def _values(flat: list[str]) -> dict[str, Any]:
    fields = fields_of(flat)
    values: dict[str, Any] = {name: _READ[name](text) for name, text in fields.items() if name in _READ}
    values["shared_with"] = values.pop("shared", ())
    values["reason"] = reason_of(fields)
    return values


def reason_of(fields: dict[str, str]) -> str | None:
    """Return why a job is in its state: the reason for its last move, or for its wait."""
    reason, waiting = fields.get("reason"), fields.get("waiting")
    return f"{reason}; {waiting}" if reason and waiting else reason or waiting or None


def _phases(told: list[tuple[str, float]], ended_at: datetime | None) -> Iterator[JobPhase]:
    """Yield phases, each of which lasts until the next one begins. Their times may be those of two clocks."""
    ends = [*(began for _, began in told), None if ended_at is None else ended_at.timestamp()][1:]
    for (name, began), end in zip(told, ends, strict=True):
        seconds = None if end is None else max(end - began, 0.0)
        yield JobPhase(name=name, began_at=datetime.fromtimestamp(began, UTC), seconds=seconds)


def shares(text: str) -> tuple[HostShare, ...]:
    return tuple(HostShare.model_validate(share) for share in orjson.loads(text))
