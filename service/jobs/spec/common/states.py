"""Defines the states of a job and the moves between them; terminal states are final."""

from __future__ import annotations

from typing import Literal

JobState = Literal["queued", "starting", "running", "cancelling", "succeeded", "failed", "cancelled"]

MOVES: dict[JobState, frozenset[JobState]] = {
    "queued": frozenset({"starting", "running", "cancelled", "failed"}),
    "starting": frozenset({"running", "queued", "cancelling", "failed"}),
    "running": frozenset({"succeeded", "failed", "queued", "cancelling"}),
    "cancelling": frozenset({"cancelled", "succeeded", "failed"}),
    "succeeded": frozenset(),
    "failed": frozenset({"queued"}),
    "cancelled": frozenset({"queued"}),
}
"""``queued`` goes straight back to ``running`` if an attempt that was given up turns out to be alive;
``failed`` and ``cancelled`` reach ``queued`` only by an explicit retry of the user, as a new attempt."""

TERMINAL: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})
ACTIVE: frozenset[JobState] = frozenset({"starting", "running", "cancelling"})
STATES: tuple[JobState, ...] = tuple(MOVES)
