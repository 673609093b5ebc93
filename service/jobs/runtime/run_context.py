"""Defines the service's interface for a kind of job on a rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

from service.jobs.events import BoundsRow
from service.jobs.files import DataLayout, JobPaths

GATE_ARTIFACTS = "gate-artifacts.json"
"""The file in an attempt's folder from which ranks read :attr:`RunContext.gate_artifacts`."""

WORKING, ENDING = "working", "ending"
"""The phases of every job: the one after its first result, and the one after its last."""

SPEC = "spec.json"
"""The file in an attempt's folder from which ranks read what to do."""

RESULT = "result.json"
"""The file in an attempt's work folder in which rank 0 leaves the result."""

HOST_CACHE = "TRIVET_HOST_CACHE"
"""The variable from which ranks read :attr:`RunContext.host_cache`."""

LARGEST_RESULT = 1 << 20
"""The most bytes of a result as JSON: it goes into the job's record, and so into every list of jobs."""


class Reporter(ABC):
    """Reports a rank's events; never blocks on the network, and never raises if nobody listens."""

    @abstractmethod
    def put(self, event: dict[str, Any]) -> None:
        """Take one event, a dictionary that :mod:`service.jobs.events` would accept."""

    @abstractmethod
    def artifact(self, path: Path, media_type: str = "application/octet-stream") -> None:
        """Announce a finished file (or folder) below the job's artifact folder; its name is its relative path."""

    def metric(self, step: int, values: Mapping[str, float]) -> None:
        """Report values measured at a step, by name."""
        self.put({"type": "metric", "step": step, "values": {name: float(value) for name, value in values.items()}})

    def bound(self, row: BoundsRow) -> None:
        """Report the bounds of one instance."""
        self.put({**row.as_dict(), "type": "bound"})

    def search(self, moment: Mapping[str, Any]) -> None:
        """Report the progress of a branch-and-bound search."""
        self.put({**moment, "type": "search"})

    def tree(self, found: Mapping[str, Any]) -> None:
        """Report the trees of the searches for one instance's verdict."""
        self.put({**found, "type": "tree"})

    def span(self, name: str, start: float, end: float, detail: Mapping[str, Any] | None = None) -> None:
        """Report a piece of work from ``start`` to ``end`` (Unix seconds)."""
        event: dict[str, Any] = {"type": "span", "name": name, "start": start, "end": end}
        self.put(event if detail is None else {**event, "detail": dict(detail)})

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
        """Report the job's progress; fields as in :class:`service.jobs.records.Progress`."""
        event = {"type": "progress", "done": done, "total": total, "unit": unit}
        finer = {"share": share, "phase": phase, "left_s": left_s}
        self.put({**event, **{name: value for name, value in finer.items() if value is not None}})

    def phase(self, name: str) -> None:
        """Report the phase that begins, such as ``preparing``; the record keeps the seconds of each."""
        self.put({"type": "phase", "name": name})

    def log(self, line: str) -> None:
        """Report a line of text."""
        self.put({"type": "log", "stream": "service", "line": line})


class Completion(TypedDict):
    """The finished part of a spec's work. A kind returns it as ``completed`` beside its result,
    and an attempt succeeds only when ``done`` equals ``total``.
    """

    done: int
    total: int
    unit: str


class RefusedError(Exception):
    """The spec asks for something impossible. Its author needs only the message, no traceback.

    ``final`` says that no other host or time would make it possible: the job is not offered to be retried.
    """

    final: ClassVar[bool] = True


@dataclass(frozen=True)
class RunContext:
    """One rank of one attempt.

    ``should_stop`` turns true when the supervisor asks the attempt to end (checkpoint, then return); nothing else does.
    ``ends_early`` says why the job is to end as a success with what it has, once its sweep asks for that.
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
    """The artifacts of the gate's job, as SHA-256 by name, from its manifest. Ranks must not trust a file that
    is absent here: it may belong to another job or another owner.
    """
    ends_early: Callable[[], str | None] = lambda: None
    host_cache: Path | None = None
    """A folder of this host where an owner's jobs keep data for later jobs of the same owner."""

    @property
    def paths(self) -> JobPaths:
        return self.data.job(self.job_id)


Runner = Callable[[Any, RunContext], Mapping[str, Any] | None]
"""``run(spec, context)`` of a kind of job, on every rank. What rank 0 returns becomes the job's result; it must hold
``completed``, a :class:`Completion`.
"""


class NullReporter(Reporter):
    """Discards everything: for tests and for ranks that report nothing."""

    def put(self, event: dict[str, Any]) -> None:
        """Discard the event."""

    def artifact(self, path: Path, media_type: str = "application/octet-stream") -> None:
        """Discard the announcement."""
