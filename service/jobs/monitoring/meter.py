"""Counts in a process until the counts are added to those of all processes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from service.jobs.monitoring.catalogue import COUNTS
from service.jobs.monitoring.numbers import field_of, observed

_BY_NAME = {metric.name: metric for metric in COUNTS}


class Meter:
    """Thread-safe. What it holds is bounded, since the values of labels are."""

    def __init__(self) -> None:
        self._counted: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """Add to a counter. Raises :class:`KeyError` for one that is not declared."""
        self._add({field_of(_BY_NAME[name].name, *labels): by})

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Enter a value into a histogram. Raises :class:`KeyError` for one that is not declared."""
        self._add(observed(_BY_NAME[name], value, labels))

    def take(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        with self._lock:
            counted, self._counted = self._counted, Counter()
        return dict(counted)

    def give_back(self, counted: Mapping[str, float]) -> None:
        """Count again what could not be added anywhere."""
        self._add(counted)

    def _add(self, counted: Mapping[str, float]) -> None:
        with self._lock:
            for field, by in counted.items():
                self._counted[field] += by  # type: ignore[assignment]  # sums of seconds are fractions
