"""What a job kind is given when it runs on a rank; all that it may know of the service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from service.jobs.bounds_row import BoundsRow
from service.jobs.layout import DataLayout, JobPaths

GATE_ARTIFACTS = "gate-artifacts.json"
"""The file in an attempt's folder in which ranks find :attr:`RunContext.gate_artifacts`."""


class Reporter(Protocol):
    """Writes events; never blocks on the network, never raises because nobody listens."""

    def metric(self, step: int, values: Mapping[str, float]) -> None: ...

    def bound(self, row: BoundsRow) -> None: ...

    def search(self, moment: Mapping[str, Any]) -> None: ...

    def span(self, name: str, start: float, end: float, detail: Mapping[str, Any] | None = None) -> None: ...

    def progress(
        self,
        done: int,
        total: int,
        unit: str,
        *,
        share: float | None = None,
        phase: str | None = None,
        left_s: float | None = None,
    ) -> None:
        """Tell how far the job is; fields as in :class:`service.jobs.records.Progress`."""

    def log(self, line: str) -> None: ...

    def artifact(self, path: Path, media_type: str = "application/octet-stream") -> None:
        """Announce a finished file (or folder) below the job's artifact folder; its name is its relative path."""


class Completion(TypedDict):
    """How much of the work that a spec asks for was done. A kind returns it as ``completed`` beside its result; an
    attempt succeeds only when ``done`` equals ``total``."""

    done: int
    total: int
    unit: str


class RefusedError(Exception):
    """What the spec asks for cannot be done: the message is all that its author needs, no traceback."""


@dataclass(frozen=True)
class RunContext:
    """One rank of one attempt.

    ``devices`` are the indices that placement granted on this host (CUDA indices, or CPU slots);
    ``should_stop`` turns true when the supervisor asks the attempt to end (checkpoint, then return); nothing else does.
    """

    job_id: str
    attempt: int
    rank: int
    local_rank: int
    world_size: int
    device_type: Literal["cuda", "cpu"]
    data: DataLayout
    report: Reporter
    should_stop: Callable[[], bool]
    gate_artifacts: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 by name of what the job that the spec's gate names has published, as its manifest has it; of those that
    are absent nobody vouches that they are that job's, or that it is of this job's owner."""

    @property
    def paths(self) -> JobPaths:
        return self.data.job(self.job_id)


class NullReporter:
    """Discards everything: for tests and for ranks that have nothing to tell."""

    def metric(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def bound(self, row: BoundsRow) -> None:
        pass

    def search(self, moment: Mapping[str, Any]) -> None:
        pass

    def span(self, name: str, start: float, end: float, detail: Mapping[str, Any] | None = None) -> None:
        pass

    def progress(
        self,
        done: int,
        total: int,
        unit: str,
        *,
        share: float | None = None,
        phase: str | None = None,
        left_s: float | None = None,
    ) -> None:
        pass

    def log(self, line: str) -> None:
        pass

    def artifact(self, path: Path, media_type: str = "application/octet-stream") -> None:
        pass


class RecordingReporter(NullReporter):
    """Keeps metrics, bounds, searches and artifacts in memory: for tests and for running a kind by itself."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.bounds: list[dict[str, Any]] = []
        self.searches: list[dict[str, Any]] = []
        self.artifacts: list[Path] = []

    def metric(self, step: int, values: Mapping[str, float]) -> None:
        self.metrics.append((step, dict(values)))

    def bound(self, row: BoundsRow) -> None:
        self.bounds.append(row.as_dict())

    def search(self, moment: Mapping[str, Any]) -> None:
        self.searches.append(dict(moment))

    def artifact(self, path: Path, media_type: str = "application/octet-stream") -> None:
        self.artifacts.append(path)

    def series(self, name: str) -> Sequence[float]:
        return [values[name] for _, values in self.metrics if name in values]
