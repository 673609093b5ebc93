"""Defines how a supervisor is tuned: times, periods and amounts that no operator has a reason to choose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SupervisorSettings:
    """Times are in seconds. What an operator chooses comes with the order of the worker."""

    claim_within_s: float = 30.0
    """A broker that is away is asked for a claim for so long; then the part is placed again."""
    report_within_s: float = 600.0
    """How long to retry reporting events, artifacts and the outcome; far longer than any lease."""

    upload_batch: int = 256
    """Events that are sent in one call."""
    upload_interval_s: float = 0.1
    """Pause after a batch that left less than another one waiting."""
    upload_full: int = 4096
    """Waiting events, from which on more of them stay where they are on disk."""
    upload_capacity: int = 50_000
    """Waiting events of the supervisor's own, from which on what can be missed live is left to the record."""
    read_interval_s: float = 0.1
    """Pause between two looks into the event files of the ranks."""
    write_interval_s: float = 0.25
    """Pause between two writes of what ranks printed and of the supervisor's own record."""
    copied_bytes: int = 4 << 20
    """Size up to which a published file is copied; larger ones get another name."""

    greeting_within_s: float = 10.0
    """A connection says so soon which rank speaks."""
    last_words_within_s: float = 1.0
    """The last words of a rank that ended may still be in its socket for so long."""
    drain_within_s: float = 5.0
    """What ended ranks left in their sockets is read for so long."""
    socket_pause_s: float = 0.01
    """Pause between two looks for last words, or for room on a disk that hangs."""
    most_unwritten_bytes: int = 16 << 20
    """Bytes of a rank's output that are kept for a disk that does not take them."""

    torchrun_ends_s: float = 3.0
    """Seconds after a rank failed for torchrun to see it, end the others with SIGTERM and report their exit codes."""
    torchrun_reports_s: float = 10.0
    """Time for it to report after all ranks were killed."""
    others_within_s: float = 10.0
    """Time beside a lease for the other hosts of a gang to report a failure that may have come before the one seen
    here.
    """

    first_rank_within_s: float = 600.0
    """Time for the first rank to be heard of, before ``stall_s`` counts."""
    stacks_within_s: float = 1.0
    """Time for ranks that hang to write their stacks."""
    stall_interval_s: float = 1.0
    """Longest pause between two looks whether the ranks hang."""
