"""Completes job ids in the shell: the newest jobs of the configured service, with what they are.

``trivet --install-completion`` sets it up for the shell in use.
"""

from __future__ import annotations

from service.jobs.records import ListedJob
from service.jobs.text import visible
from trivet.client import Client
from trivet.errors import TrivetError

_OFFERED = 50
_PATIENCE_S = 2.0
"""A shell that waits for its completion is stuck: after so long nothing is offered."""


def job_ids(incomplete: str) -> list[tuple[str, str]]:
    """Return ids that begin as typed, newest first, each with what the shell shows beside it. Nothing where no service
    answers: a completion has no way to tell what is wrong.
    """
    try:
        with Client(timeout_s=_PATIENCE_S) as service:
            found = service.jobs(limit=_OFFERED).items
    except (TrivetError, OSError, ValueError):
        return []
    safe = (job for job in found if job.id == visible(job.id))
    return [(job.id, _described(job)) for job in safe if job.id.startswith(incomplete)]


def _described(job: ListedJob) -> str:
    return visible(f"{job.state} {job.kind} {job.name}").replace("\n", " ")
