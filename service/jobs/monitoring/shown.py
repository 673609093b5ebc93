"""Shows an alert to people and programs: what ``GET /v1/alerts`` answers and ``trivet alerts`` prints."""

from __future__ import annotations

from datetime import UTC, datetime

from service.jobs.monitoring.alerts import AlertState, AlertStatus, Severity
from service.jobs.records import FrozenModel


class ShownAlert(FrozenModel):
    """One alert, for one set of labels."""

    name: str
    severity: Severity
    state: AlertState
    """``pending`` while the condition holds, and not yet for as long as it must to be told of."""
    labels: dict[str, str]
    """What it is about, such as ``host``; empty where it is the whole service."""
    value: float | None = None
    since: datetime | None = None
    meaning: str
    action: str
    """What to do about it."""
    expression: str
    """Return a condition as a query for Prometheus."""

    @classmethod
    def of(cls, status: AlertStatus) -> ShownAlert:
        """Return how an alert stands, with what it says."""
        alert = status.alert
        return cls(
            name=alert.name,
            severity=alert.severity,
            state=status.state,
            labels=dict(status.labels),
            value=status.value,
            since=None if status.since is None else datetime.fromtimestamp(status.since, UTC),
            meaning=alert.meaning,
            action=alert.action,
            expression=alert.condition.promql,
        )
