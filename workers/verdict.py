"""Decides how an attempt ended, and whose fault it was, from what the supervisor saw. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from service.jobs.events import ErrorEvent
from service.jobs.records import JobError, Outcome

Cause = Literal["exited", "rank_failed", "stop", "timeout", "interrupted", "terminated", "fenced", "fault"]
"""What made the group end: of itself; a rank; a request; the time limit; the end of the service on this host, which is
not the job's; another signal to the supervisor; its lease; an error of the supervisor's own."""

_LONGEST_MESSAGE = 4000
_HOSTS_FAULTS = {
    "terminated": ("SupervisorTerminated", "the supervisor got SIGTERM, as when a host shuts down"),
    "fenced": ("LeaseLost", "the broker was out of reach for most of the lease, so the group was ended"),
}
_AFTERMATH = frozenset({-signal.SIGABRT, -signal.SIGTERM})
"""How a rank dies when a peer failed first: a communication library aborts, torchrun ends the rest."""


@dataclass(frozen=True)
class Evidence:
    """``exit_codes`` as torchrun reported them (negative: signal); ``silent`` ranks ended without a last word, first
    one first, before anything was killed from here; ``result`` is absent or what rank 0 returned.
    """

    cause: Cause
    launcher_code: int
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    errors: Sequence[ErrorEvent] = ()
    silent: Sequence[int] = ()
    tails: Mapping[int, Sequence[str]] = field(default_factory=dict)
    launcher_tail: Sequence[str] = ()
    result: Mapping[str, Any] | None = None
    result_missing: bool = False
    """Rank 0 ran here, but left no result."""
    timeout_s: float | None = None
    fault: str = ""
    """The supervisor's own error, when that is the cause."""
    attempt: int = 1


def judge(evidence: Evidence) -> Outcome:
    """The outcome to report. A failure names the rank that failed *first*: its peers fail in its wake."""
    return _from_outside(evidence) or _failure(evidence) or _success(evidence)


def _from_outside(evidence: Evidence) -> Outcome | None:
    match evidence.cause:
        case "stop":
            return Outcome("stopped")
        case "timeout":
            return _failed("TimeoutExceeded", f"the attempt ran longer than timeout_s = {evidence.timeout_s:g}")
        case "interrupted":
            return Outcome("interrupted", error=JobError(type="Interrupted", message="the service on its host stopped"))
        case "terminated" | "fenced" as cause:
            return _failed(*_HOSTS_FAULTS[cause])
        case "fault":
            return _failed("SupervisorFault", evidence.fault)
    return None


def traceback_name(attempt: int, rank: int) -> str:
    """The artifact that holds a rank's traceback."""
    return f"errors/attempt-{attempt}-rank-{rank}.txt"


def _failure(evidence: Evidence) -> Outcome | None:
    dead = _dead_rank(evidence)
    if dead is not None and (not evidence.errors or _came_first(dead, evidence)):
        return _rank_died(dead, evidence)
    if evidence.errors:
        return _rank_raised(evidence.errors[0], evidence.attempt)
    if evidence.launcher_code != 0 or evidence.cause == "rank_failed":
        said = _quote(evidence.launcher_tail)
        return _failed("LaunchFailed", f"torchrun ended with exit code {evidence.launcher_code}{said}")
    return None


def _dead_rank(evidence: Evidence) -> int | None:
    """The rank that ended first without a word, one that torchrun alone saw end when no other did."""
    raised = {event["rank"] for event in evidence.errors}
    dead = list(evidence.silent)
    if not dead and evidence.cause == "exited":
        dead = sorted(rank for rank in evidence.exit_codes if rank not in raised)
    telling = [rank for rank in dead if evidence.exit_codes.get(rank, 0) not in _AFTERMATH]
    return next(iter(telling or dead), None)


def _came_first(rank: int, evidence: Evidence) -> bool:
    """Whether a silent death explains the exceptions beside it. A rank whose peer is killed raises within
    milliseconds, so the order of arrival does not tell; but a peer's exception makes no rank vanish silently,
    except by the signals of the aftermath.
    """
    code = evidence.exit_codes.get(rank, 0)
    return rank in evidence.silent and code != 0 and code not in _AFTERMATH


def _rank_died(rank: int, evidence: Evidence) -> Outcome:
    code = evidence.exit_codes.get(rank)
    if code is None:
        how = "ended before its work was done"
    elif code < 0:
        how = f"was ended by {_signal_name(-code)}"
        how += " (the kernel does this when memory runs out)" if code == -signal.SIGKILL else ""
    else:
        how = f"exited with code {code} without reporting an error"
    wake = "".join(f"; rank {event['rank']} raised {event['error']}: {event['message']}" for event in evidence.errors)
    tail = evidence.tails.get(rank) or evidence.launcher_tail
    return _failed("RankDied", f"rank {rank} {how}{wake}{_quote(tail)}", rank)


def _rank_raised(event: ErrorEvent, attempt: int) -> Outcome:
    rank = event["rank"]
    assert rank is not None
    trace = traceback_name(attempt, rank) if event["traceback"] else None
    return _failed(event["error"], event["message"], rank, trace)


def _success(evidence: Evidence) -> Outcome:
    if evidence.result_missing:
        return _failed("NoResult", "the group exited with code 0, but rank 0 left no result")
    return Outcome("succeeded", None if evidence.result is None else dict(evidence.result))


def _failed(error: str, message: str, rank: int | None = None, traceback: str | None = None) -> Outcome:
    cut = message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 1] + "…"
    return Outcome("failed", error=JobError(type=error, message=cut, rank=rank, traceback_artifact=traceback))


def _quote(lines: Sequence[str]) -> str:
    return "; its last lines: " + " | ".join(line.strip() for line in lines if line.strip()) if any(lines) else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
