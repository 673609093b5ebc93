"""Describes jobs that wait for devices, as plans over the queue see them."""

from __future__ import annotations

from dataclasses import dataclass

from service.jobs.projects import DEFAULT_PROJECT


@dataclass(frozen=True)
class PendingJob:
    """A job that waits for devices: ``ranks`` of one ``pool``, on ``max_hosts`` hosts at most."""

    id: str
    kind: str
    owner: str
    pool: str
    ranks: int
    max_hosts: int
    priority: int
    queued_at_ms: int
    """By the store's own clock."""
    timeout_s: float | None = None
    project: str = DEFAULT_PROJECT
