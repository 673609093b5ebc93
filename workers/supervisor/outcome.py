"""Decides how an attempt ended, and whose fault it was, from the supervisor's evidence. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from service.jobs.events import LONGEST_MESSAGE, LONGEST_WORDS, ErrorEvent
from service.jobs.files import DISK_FULL
from service.jobs.records import JobError, PartOutcome
from service.jobs.text import shortened
from service.linux import signal_name

Cause = Literal[
    "exited",
    "rank_failed",
    "stop",
    "timeout",
    "stalled",
    "interrupted",
    "terminated",
    "lease_expired",
    "disk_full",
    "fault",
]
"""What ended the group: itself; a rank; a request; the time limit; ranks that hang; the end of the service on
this host, which is not the job's fault; another signal to the supervisor; its lease; a disk without room for
the attempt's record; the supervisor's own error."""

_HOSTS_FAULTS = {
    "terminated": ("SupervisorTerminated", "the supervisor got SIGTERM, as when a host shuts down"),
    "lease_expired": ("LeaseLost", "the broker was out of reach for most of the lease, so the group was ended"),
}
_PASSED_ON = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that torchrun passes to its ranks before it ends by them."""
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|timed out)|broken pipe|socket (closed|error|timeout)|remote peer"
    r"|peer.*gone|no route to host|(host|network) is (down|unreachable)"
    r"|ncclRemoteError|ncclSystemError|remote process exited|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)
"""The words with which communication libraries report a peer's end, which is never the cause itself."""


@dataclass(frozen=True)
class Evidence:
    """The evidence about the ranks of one host, up to the first kill from here.

    Times are in Unix seconds. Those in ``errors`` and ``terminated`` are the ranks' own, so they give the order of
    events, whatever the order of arrival. A time in ``silent`` is when the supervisor noticed the end, perhaps long
    after it.
    """

    cause: Cause
    launcher_code: int | None
    """As in a shell: 128 + n for signal n. Negative if a signal ended the keeper of torchrun, None if torchrun
    was ended from here.
    """
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    """Exit codes other than 0 by rank, as torchrun reported them, negative for signals. None if torchrun could not
    report.
    """
    errors: Sequence[ErrorEvent] = ()
    """The exceptions that ranks reported."""
    terminated: Mapping[int, float] = field(default_factory=dict)
    """Ranks that got SIGTERM, and when."""
    silent: Mapping[int, float] = field(default_factory=dict)
    """Ranks that ended without a last word."""
    ranks: int = 0
    """How many ranks were to run here."""
    done: int = 0
    """How many of them reported that their work is done."""
    oom_kills: int = 0
    """Processes that the kernel's out-of-memory killer killed on this host during the attempt."""
    tails: Mapping[int, Sequence[str]] = field(default_factory=dict)
    launcher_tail: Sequence[str] = ()
    leads: bool = False
    """Whether rank 0, which leaves the result, ran here."""
    result: Mapping[str, Any] | None = None
    """The result that rank 0 left, with ``completed`` beside it."""
    odd_result: str = ""
    """Why what rank 0 left is no result."""
    timeout_s: float | None = None
    stall_s: float | None = None
    hanging: Mapping[int, str] = field(default_factory=dict)
    """The frame of each rank that was silent for too long."""
    fault: str = ""
    """The supervisor's own error, if that is the cause."""
    attempt: int = 1


@dataclass(frozen=True)
class _Death:
    """A rank that ended without reporting an exception."""

    rank: int


def judge(evidence: Evidence) -> PartOutcome:
    """Return the outcome to report. A failure names the rank that failed *first*: its peers fail in its wake.
    Success means that every rank said it was done, and that all the work of the spec was.
    """
    return _from_outside(evidence) or _failure(evidence) or _shortfall(evidence) or _success(evidence)


def may_be_aftermath(evidence: Evidence) -> bool:
    """Return whether the failure here may have followed that of a rank on another host of the gang: only an
    exception about a lost peer ended a rank here, or SIGTERM, with which torchrun ends the rest of a gang.
    """
    if evidence.cause not in ("exited", "rank_failed") or _find_killed(evidence) is not None:
        return False
    return all(_says_that_a_peer_is_gone(error) for error in evidence.errors)


def may_be_the_end_of_all(evidence: Evidence) -> bool:
    """Return whether SIGKILL ended a rank or torchrun, and not for lack of memory: a scheduler that ends everything of
    an allocation, or the runtime of a container, may reach this process last.
    """
    if evidence.cause not in ("exited", "rank_failed") or evidence.oom_kills:
        return False
    return _lost_its_launcher(evidence) == signal.SIGKILL or -signal.SIGKILL in evidence.exit_codes.values()


def _from_outside(evidence: Evidence) -> PartOutcome | None:
    match evidence.cause:
        case "exited" | "rank_failed":
            return None
        case "stop":
            return PartOutcome("stopped")
        case "interrupted":
            return PartOutcome(
                "interrupted", error=JobError(type="Interrupted", message="the service on its host stopped")
            )
        case "terminated" | "lease_expired" as cause:
            return _lost_outcome(*_HOSTS_FAULTS[cause])
        case "fault":
            return _lost_outcome("SupervisorFault", evidence.fault)
    return _over_a_limit(evidence)


def _over_a_limit(evidence: Evidence) -> PartOutcome:
    if evidence.cause == "timeout":
        return _failed_outcome(
            "TimeoutExceeded", f"the attempt ran longer than timeout_s = {evidence.timeout_s or 0:g}"
        )
    if evidence.cause == "disk_full":
        return _failed_outcome(DISK_FULL, evidence.fault)
    places = [f"rank {rank} is at {place}" for rank, place in sorted(evidence.hanging.items())]
    limit = evidence.stall_s or 0
    said = f"no rank reported or printed anything for stall_s = {limit:g} s: {'; '.join(places) or 'none is there'}"
    first = min(evidence.hanging, default=None)
    trace = None if first is None else traceback_name(evidence.attempt, first)
    return _failed_outcome("Stalled", said, first if len(places) == 1 else None, trace)


def traceback_name(attempt: int, rank: int) -> str:
    """Return the name of the artifact that holds a rank's traceback."""
    return f"errors/attempt-{attempt}-rank-{rank}.txt"


def _failure(evidence: Evidence) -> PartOutcome | None:
    if evidence.launcher_code is not None and evidence.launcher_code < 0:
        name = signal_name(-evidence.launcher_code)
        return _lost_outcome("KeeperEnded", f"the process that keeps the group together was ended by {name}")
    if (number := _lost_its_launcher(evidence)) is not None:
        return _failed_outcome(
            "LaunchFailed", f"torchrun was ended by {signal_name(number)}{_quote(evidence.launcher_tail)}"
        )
    cause = _find_killed(evidence) or _find_first_by_time(evidence) or _find_never_there(evidence)
    if isinstance(cause, _Death):
        return _rank_died(cause.rank, evidence)
    if cause is not None:
        return _rank_raised(cause, evidence.attempt)
    if evidence.launcher_code != 0 or evidence.cause == "rank_failed":
        how = "was ended" if evidence.launcher_code is None else f"ended with exit code {evidence.launcher_code}"
        return _failed_outcome("LaunchFailed", f"torchrun {how}{_quote(evidence.launcher_tail)}")
    return None


def _lost_its_launcher(evidence: Evidence) -> int | None:
    """Return the signal that ended torchrun, if one did: torchrun takes its ranks along without exit codes, or
    passes the signal on.
    """
    code = evidence.launcher_code
    if code is None or code <= 128 or evidence.exit_codes:
        return None
    if evidence.terminated and code - 128 not in _PASSED_ON:
        return None
    passed_on = "KeyboardInterrupt" if code - 128 == signal.SIGINT else None
    own = [error for error in evidence.errors if error["error"] != passed_on]
    return None if any(not _says_that_a_peer_is_gone(error) for error in own) else code - 128


def _find_killed(evidence: Evidence) -> _Death | None:
    """Return the rank that was first ended by a signal or by its own silent exit. The end of a peer never does
    that to a rank, except through the abort of a communication library or torchrun's SIGTERM
    (:func:`_find_first_by_time`).
    """
    in_the_wake = (None, -signal.SIGABRT, -signal.SIGTERM)
    own = {rank: at for rank, at in evidence.silent.items() if evidence.exit_codes.get(rank) not in in_the_wake}
    return _find_earliest(own)


def _find_first_by_time(evidence: Evidence) -> ErrorEvent | _Death | None:
    """Return the first exception, or the rank that got SIGTERM or ended silently before it.

    A silent end is noticed some time after it happened. So one that was noticed after an exception may have come
    before it, and did if the exception says that a peer is gone.
    """
    first = min(evidence.errors, key=lambda error: error["time"], default=None)
    ends = {**evidence.silent, **evidence.terminated}
    dead = _find_earliest(ends)
    if first is None or (dead is not None and ends[dead.rank] <= first["time"]):
        return dead
    return (_find_earliest(evidence.silent) if _says_that_a_peer_is_gone(first) else None) or first


def _find_earliest(ends: Mapping[int, float]) -> _Death | None:
    return _Death(min(ends, key=lambda rank: ends[rank])) if ends else None


def _says_that_a_peer_is_gone(error: ErrorEvent) -> bool:
    return _PEER_GONE.search(error["message"]) is not None


def _find_never_there(evidence: Evidence) -> _Death | None:
    """Return a rank whose failure only torchrun saw: it ended before it reached its supervisor, or after its
    work was done.
    """
    failed = sorted(evidence.exit_codes) if evidence.cause == "exited" else []
    telling = [rank for rank in failed if evidence.exit_codes[rank] not in (-signal.SIGABRT, -signal.SIGTERM)]
    return _Death((telling or failed)[0]) if failed else None


def _rank_died(rank: int, evidence: Evidence) -> PartOutcome:
    code = evidence.exit_codes.get(rank)
    if rank in evidence.terminated:
        how = "was ended by SIGTERM, which the service did not send (a memory daemon does, or somebody on its host)"
    elif code is None:
        how = "ended before its work was done"
    elif code == -signal.SIGKILL:
        how = f"was killed by SIGKILL; {_out_of_memory(evidence.oom_kills)}"
    elif code < 0:
        how = f"was ended by {signal_name(-code)}"
    else:
        how = f"exited with code {code} without reporting an error"
    wake = "".join(f"; rank {event['rank']} raised {event['error']}: {event['message']}" for event in evidence.errors)
    tail = evidence.tails.get(rank) or evidence.launcher_tail
    return _failed_outcome("RankDied", f"rank {rank} {how}{wake}{_quote(tail)}", rank)


def _out_of_memory(kills: int) -> str:
    if kills:
        return f"the kernel's out-of-memory killer ended {kills} process{'es' * (kills > 1)} here during the attempt"
    return "the kernel's out-of-memory killer is the usual sender"


def _rank_raised(event: ErrorEvent, attempt: int) -> PartOutcome:
    rank = event["rank"]
    assert rank is not None
    trace = traceback_name(attempt, rank) if event["traceback"] else None
    return _failed_outcome(event["error"], event["message"], rank, trace, final=event.get("final", False))


def _shortfall(evidence: Evidence) -> PartOutcome | None:
    """Exit code 0 is no proof that the work was done."""
    if evidence.done < evidence.ranks:
        said = f"only {evidence.done} of {evidence.ranks} ranks said that their work is done"
        return _failed_outcome("Incomplete", f"torchrun ended with exit code 0, but {said}")
    if not evidence.leads:
        return None
    if evidence.result is None:
        left = f"what rank 0 left as its result is none: {evidence.odd_result}"
        said = left if evidence.odd_result else "rank 0 left no result"
        return _failed_outcome("NoResult", f"the group exited with code 0, but {said}", 0)
    match evidence.result.get("completed"):
        case {"done": int(done), "total": int(total), "unit": str(unit)}:
            said = f"{done} of {total} {unit} were done when the ranks ended without being asked to stop"
            return None if done == total else _failed_outcome("Incomplete", said)
    return _failed_outcome("NoResult", "rank 0 left a result that does not say how much of the work was done", 0)


def _success(evidence: Evidence) -> PartOutcome:
    if evidence.result is None:
        return PartOutcome("succeeded")
    return PartOutcome(
        "succeeded", {name: value for name, value in evidence.result.items() if name != "completed"} or None
    )


def _failed_outcome(
    error: str, message: str, rank: int | None = None, traceback: str | None = None, *, final: bool = False
) -> PartOutcome:
    return PartOutcome(
        "failed",
        error=JobError(
            type=shortened(error, LONGEST_WORDS),
            message=_cut(message),
            rank=rank,
            traceback_artifact=traceback,
            final=final,
        ),
    )


def _lost_outcome(error: str, message: str) -> PartOutcome:
    """Return a loss that is not the job's fault and costs no retry."""
    return PartOutcome("lost", error=JobError(type=error, message=_cut(message)))


def _cut(message: str) -> str:
    return shortened(message, LONGEST_MESSAGE - 1)


def _quote(lines: Sequence[str]) -> str:
    return "; its last lines: " + " | ".join(line.strip() for line in lines if line.strip()) if any(lines) else ""
