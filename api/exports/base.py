"""Defines the interface of exporters, and the form of a job for them."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, BinaryIO, ClassVar, Protocol

from api.exports.server import ExportFailed, ExportServer
from api.reads import EventHistory
from api.routes.metrics import Points, collect
from service.jobs.files import DataLayout, Folder
from service.jobs.files.objects import RemoteFile, RemoteFolder
from service.jobs.records import Artifact, Job, NotFound
from service.jobs.store import Store

_NOT_PARAMETERS = ("kind", "name", "labels", "export")


@dataclass(frozen=True)
class ExportedJob:
    """A job with its metrics and files, as far as it has come."""

    job: Job
    store: Store
    data: DataLayout

    def parameters(self) -> dict[str, str]:
        """Return the fields of the spec by dotted path, as text; those that are null are left out."""
        spec = {name: value for name, value in self.job.spec.items() if name not in _NOT_PARAMETERS}
        return {path: value if isinstance(value, str) else json.dumps(value) for path, value in _leaves(spec, "")}

    def results(self) -> dict[str, float]:
        """Return the numbers of the result by dotted path, verdicts by how many instances or rungs have each."""
        return {
            path: float(value)
            for path, value in _leaves(self.job.result or {}, "")
            if isinstance(value, int | float) and not isinstance(value, bool)
        }

    def findings(self) -> dict[str, str]:
        """Return the texts of the result by dotted path, such as the modes that a gate allows."""
        return {path: value for path, value in _leaves(self.job.result or {}, "") if isinstance(value, str)}

    def identity(self) -> dict[str, str]:
        """Return what stays the same as long as there is the job, by name."""
        job = self.job
        facts = {"job": job.id, "kind": job.kind, "name": job.name, "owner": job.owner, "project": job.project}
        return facts | {f"label.{name}": value for name, value in job.labels.items()}

    def facts(self) -> dict[str, str]:
        """Return what is known of the job by now, by name."""
        job = self.job
        facts = {**self.identity(), "state": job.state, "attempt": str(job.attempt)}
        for by in job.computed_by[-1:]:
            facts |= {f"computed_by.{name}": str(value) for name, value in by.facts().items() if value is not None}
        if job.error is not None:
            facts["error"] = str(job.error)
        return facts

    @property
    def now(self) -> float:
        """Return when the job ended, or else began, in Unix seconds."""
        return (self.job.ended_at or self.job.started_at or self.job.created_at).timestamp()

    @property
    def last_step(self) -> int:
        return max((step for points in self.metrics.values() for step in points), default=0)

    @cached_property
    def metrics(self) -> dict[str, Points]:
        """Return every metric: name → step → (Unix seconds, value)."""
        events = EventHistory(self.store, self.data).events(self.job.id, frozenset({"metric"}))
        return {name: points for name, points in sorted(collect(events, None).items()) if points}

    def files(self, most_bytes: int) -> Iterator[tuple[str, int, BinaryIO]]:
        """Yield name, size and content of each published file, those of folders too, except those larger than
        ``most_bytes``. Yields nothing for a deleted job.
        """
        for artifact in self.store.artifacts.list(self.job.id):
            try:
                _, opened = self.store.artifacts.open(self.job.id, artifact.name)
            except NotFound:
                continue
            if isinstance(opened, RemoteFile | RemoteFolder):
                yield from _remote(artifact, opened, most_bytes)
                continue
            with opened:
                yield from _files(artifact, opened, most_bytes)


class RunGoneError(ExportFailed):
    """What an earlier :meth:`Exporter.begin` made is no longer there."""


class Exporter(Protocol):
    """Exports a job to one kind of service: begins, sends points while the job goes on, and ends. Runs in a thread.

    ``server`` is that of the target's URL, ``None`` without one. ``mark`` is a text that says where points go on, such
    as the id of a run. Sending the same points again with the same mark must change nothing. Methods raise
    :class:`ExportFailed`, ``OSError`` or an HTTP error if a later attempt may succeed. One that ``holds_runs`` has them
    open from call to call, so that one process at a time makes its exports.
    """

    holds_runs: ClassVar[bool] = False

    def begin(self, told: ExportedJob, server: ExportServer | None) -> str:
        """Begin the job's export in place of earlier ones, with what is known before any point; return the mark."""

    def send(self, told: ExportedJob, server: ExportServer | None, mark: str, points: Mapping[str, Points]) -> str:
        """Add points by metric and step; return the next mark. There may be none, which says that the job goes on."""

    def end(self, told: ExportedJob, server: ExportServer | None, mark: str) -> str:
        """Add what only an ended job has; return where the job can be seen."""

    def close(self) -> None:
        """Let go of what is open; the service stops."""


def _files(artifact: Artifact, opened: BinaryIO | Folder, most_bytes: int) -> Iterator[tuple[str, int, BinaryIO]]:
    if not isinstance(opened, Folder):
        if artifact.bytes <= most_bytes:
            yield artifact.name, artifact.bytes, opened
        return
    for entry in opened.files():
        if entry.status.st_size <= most_bytes:
            with opened.reader(entry.name) as file:
                yield f"{artifact.name}/{entry.name}", entry.status.st_size, file


def _remote(
    artifact: Artifact, found: RemoteFile | RemoteFolder, most_bytes: int
) -> Iterator[tuple[str, int, BinaryIO]]:
    files = {"": found} if isinstance(found, RemoteFile) else found.files
    for name, each in files.items():
        if each.bytes <= most_bytes:
            with each.opened() as file:
                yield f"{artifact.name}/{name}".rstrip("/"), each.bytes, file


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(each, f"{path}.{name}" if path else str(name))
    elif value is not None:
        yield path, value


def by_step(points: Mapping[str, Points]) -> list[tuple[int, float, dict[str, float | None]]]:
    """Return a row for each step: its number, when the last of its values was measured, and all of them."""
    rows: dict[int, dict[str, float | None]] = defaultdict(dict)
    times: dict[int, float] = {}
    for name, each in points.items():
        for step, (when, value) in each.items():
            rows[step][name] = value
            times[step] = max(when, times.get(step, when))
    return [(step, times[step], rows[step]) for step in sorted(rows)]


def portions(values: Iterator[dict[str, Any]], most: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the values of bounded requests."""
    while portion := list(islice(values, most)):
        yield portion


def json_number(value: float | None) -> float | str:
    """Return a value as protobuf's JSON has it, which writes those that are not finite as text."""
    if value is None or math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else f"{'-' if value < 0 else ''}Infinity"
