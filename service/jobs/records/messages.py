"""Writes what a person reads of a job's change: a subject and lines, for chats and e-mail."""

from __future__ import annotations

from dataclasses import dataclass

from service.jobs.records.webhooks import WebhookEvent
from service.jobs.text import visible

_LONGEST = 1000


@dataclass(frozen=True)
class WrittenMessage:
    """A subject of one line, and the text below it."""

    subject: str
    text: str


def message_of(event: WebhookEvent) -> WrittenMessage:
    """Return the message about an event. What users named cannot break out of its line."""
    change = event.data
    what = f"{change.kind} job {change.name} {change.state}"
    if (reached := change.metric) is not None:
        at = "" if reached.step is None else f" at step {reached.step}"
        what = f"{change.kind} job {change.name}: {reached.name} is {reached.value:.6g} ({reached.threshold}){at}"
    facts = {
        "job": change.job,
        "project": change.project,
        "owner": change.owner,
        "state": change.state,
        "attempt": str(change.attempt),
        "reason": change.reason or "",
        "time": event.timestamp.isoformat(timespec="seconds"),
    }
    lines = [f"{name}: {_in_a_line(value)}" for name, value in facts.items() if value]
    return WrittenMessage(_in_a_line(what), "\n".join(lines))


def _in_a_line(text: str) -> str:
    return visible(" ".join(text.split()))[:_LONGEST]
