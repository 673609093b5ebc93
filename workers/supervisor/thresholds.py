"""Notices the first values of a job that are beyond the thresholds of its spec, so that they are told of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from service.jobs.events import Event, MetricEvent
from service.jobs.spec.notify import NotifySpec
from service.jobs.webhooks import ReachedThreshold


class Thresholds:
    """Keeps which thresholds were reached in this attempt; those of earlier attempts are known to the store."""

    def __init__(self, notify: NotifySpec | None) -> None:
        self._notify = notify
        self._known: set[str] = set()

    def reached(self, events: Sequence[Event]) -> list[ReachedThreshold]:
        """Return the first metrics, among these events, that are beyond their thresholds."""
        metrics = [cast(MetricEvent, event) for event in events if event["type"] == "metric"]
        return [found for metric in metrics for found in self._new(metric["values"], metric["step"])]

    def reached_by_result(self, result: Mapping[str, Any] | None) -> list[ReachedThreshold]:
        """Return the numbers of a result that are beyond their thresholds, where no metric was before."""
        return self._new(result or {}, None)

    def _new(self, numbers: Mapping[str, Any], step: int | None) -> list[ReachedThreshold]:
        if self._notify is None:
            return []
        new = [(name, value) for name, value in self._notify.reached(numbers) if name not in self._known]
        self._known.update(name for name, _ in new)
        return [
            ReachedThreshold(name=name, value=value, threshold=self._notify.when[name], step=step)
            for name, value in new
        ]
