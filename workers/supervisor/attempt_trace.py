"""Makes the spans of one attempt on a host; its ranks report theirs, since they cannot reach a collector."""

from __future__ import annotations

import contextlib
import fnmatch
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.jobs.events import ErrorEvent
from service.jobs.files import Folder, JobPaths
from service.jobs.records import Claim, PartOutcome
from service.jobs.store import Store
from service.jobs.text import set_log_fields
from service.jobs.tracing import TraceSpan, Tracing, trace_id, valid_traceparent
from workers.supervisor.lease import retry_until
from workers.supervisor.settings import SupervisorSettings

_FILE = "traceparent"
_LONGEST = 1024
_ALL_UNTIL = 20
_THEN_EVERY = 100


async def submitting_span(tracing: Tracing, store: Store, job_id: str, settings: SupervisorSettings) -> str | None:
    """Return the span that submitted a job, if tracing is on; this process's log names its trace."""
    if not tracing.is_on:
        return None
    parent = await retry_until(settings.claim_within_s, store.jobs.traceparent, job_id)
    if parent is not None:
        set_log_fields(trace_id=trace_id(parent))
    return parent


@contextmanager
def traced_attempt(tracing: Tracing, parent: str | None, claim: Claim, paths: JobPaths) -> Iterator[AttemptTrace]:
    """Yield the trace of a claimed part, below the request's span, with a link to the previous attempt; send it
    at the end.
    """
    ref = claim.ref
    attributes: dict[str, str | int] = {
        "job": ref.job_id,
        "kind": claim.spec.kind,
        "attempt": ref.attempt,
        "host": ref.host,
    }
    before = _spans_of(paths.attempt(ref.attempt - 1)) if tracing.is_on else ()
    try:
        with tracing.span("attempt", parent, attributes, before) as span:
            if tracing.is_on and span.traceparent is not None:
                paths.root.mkdir(parents=True, exist_ok=True)
                with Folder.open(paths.root) as root, root.make(f"{paths.attempts.name}/{ref.attempt}") as folder:
                    folder.write(f"{_FILE}.{ref.host}", span.traceparent.encode())
            yield AttemptTrace(tracing, span)
    finally:
        tracing.close()


def _spans_of(folder: Path) -> list[str]:
    """Return the spans of an attempt's parts, by its folder."""
    found = []
    with contextlib.suppress(OSError), Folder.open(folder) as opened:
        for name in fnmatch.filter(opened.names(), f"{_FILE}.*"):
            with contextlib.suppress(OSError):
                found.append(valid_traceparent(opened.read(name, _LONGEST).decode(errors="replace")))
    return [each for each in found if each is not None]


@dataclass
class AttemptTrace:
    """Turns events into spans below the attempt's.

    It keeps the first spans of each name and rank, then every hundredth: a job may run for millions of steps.
    """

    tracing: Tracing
    span: TraceSpan
    began_s: float = field(default_factory=time.time)
    _launched_s: float = field(default_factory=time.time)
    _heard: set[int | None] = field(default_factory=set)
    _counts: dict[tuple[str, int | None], int] = field(default_factory=dict)
    _last: dict[int | None, float] = field(default_factory=dict)
    _steps: dict[int | None, int] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """Enter an event of a rank."""
        if not self.tracing.is_on:
            return
        rank, at = event["rank"], float(event["time"])
        if rank not in self._heard:
            self._heard.add(rank)
            self._enter("start", rank, self._launched_s, at, {})
        match event["type"]:
            case "span":
                self._enter(str(event["name"]), rank, float(event["start"]), float(event["end"]), {})
            case "metric":
                step = int(event["step"])
                if step != self._steps.get(rank):  # further metrics of a step follow its own
                    self._enter("step", rank, self._last.get(rank, self.began_s), at, {"step": step})
                    self._steps[rank] = step
                self._last[rank] = at
            case "bound":
                took = event.get("seconds")
                began = at - took if isinstance(took, int | float) else self._last.get(rank, self.began_s)
                details: dict[str, str | int] = {"instance": int(event["instance"]), "verdict": str(event["verdict"])}
                self._enter("instance", rank, began, at, details)
                self._last[rank] = at

    def note_launch(self) -> None:
        """Note that torchrun was told to start the ranks."""
        self._launched_s = time.time()

    def note_end(self, outcome: PartOutcome, errors: Sequence[ErrorEvent]) -> None:
        """Enter the exceptions that ended ranks, and how the part ended."""
        for error in errors:
            details = {
                "exception.type": error["error"],
                "exception.message": error["message"],
                "exception.stacktrace": error["traceback"],
            }
            self.span.event("exception", error["time"], _with_rank(details, error["rank"]))
        if outcome.status != "succeeded":
            self.span.fail(outcome.status if outcome.error is None else outcome.error.type)

    def _enter(self, name: str, rank: int | None, start: float, end: float, details: Mapping[str, str | int]) -> None:
        count = self._counts[name, rank] = self._counts.get((name, rank), 0) + 1
        if count <= _ALL_UNTIL or count % _THEN_EVERY == 0:
            self.tracing.record(name, self.span.traceparent, start, max(start, end), _with_rank(details, rank))


def _with_rank(details: Mapping[str, str | int], rank: int | None) -> Mapping[str, str | int]:
    return details if rank is None else {**details, "rank": rank}
