"""Keeps counts, and formats the values of metrics for Prometheus: a histogram is its cumulative buckets, sum and
count.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from service.jobs.monitoring.catalogue import COUNTS, MetricDeclaration

_BY_NAME = {metric.name: metric for metric in COUNTS}
_SEPARATOR = "\t"


class Series(NamedTuple):
    """Names one value: a metric, or a part of a histogram, and its labels in declared order."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


Numbers = dict[Series, float]


def _field_of(name: str, *words: str) -> str:
    """Return the name of a count in the store (``lua/lib/counts.lua`` makes the same)."""
    return _SEPARATOR.join((name, *words))


def _count_observation(metric: MetricDeclaration, value: float, labels: Sequence[str]) -> dict[str, float]:
    """Return the increments of a histogram's counts for one observation."""
    bound = metric.bounds[bisect_left(metric.buckets, value)]
    return {_field_of(f"{metric.name}_bucket", bound, *labels): 1, _field_of(f"{metric.name}_sum", *labels): value}


def from_counts(counts: Mapping[str, str]) -> Numbers:
    """Return stored counts as numbers, with zeros for missing ones.

    Counts that only another version knows are left out.
    """
    numbers: Numbers = {}
    buckets: defaultdict[tuple[MetricDeclaration, tuple[str, ...]], dict[str, float]] = defaultdict(dict)
    for metric in COUNTS:
        if not metric.labels and metric.kind == "counter":
            numbers[Series(metric.name)] = 0.0
        elif not metric.labels:
            buckets[metric, ()] = {}
            numbers[Series(f"{metric.name}_sum")] = 0.0
    for field, text in counts.items():
        name, *words = field.split(_SEPARATOR)
        bucketed = _declared(name.removesuffix("_bucket"), "histogram", len(words) - 1)
        plain = _declared(name, "counter", len(words)) or _declared(name.removesuffix("_sum"), "histogram", len(words))
        if bucketed is not None:
            buckets[bucketed, tuple(words[1:])][words[0]] = float(text)
        elif plain is not None:
            numbers[Series(name, _labelled(plain, words))] = float(text)
    for (metric, labels), counted in buckets.items():
        numbers |= _cumulative(metric, _labelled(metric, labels), counted)
    return numbers


def _declared(name: str, kind: str, labels: int) -> MetricDeclaration | None:
    metric = _BY_NAME.get(name)
    return metric if metric is not None and metric.kind == kind and len(metric.labels) == labels else None


def _labelled(metric: MetricDeclaration, values: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(zip(metric.labels, values, strict=True))


def _cumulative(
    metric: MetricDeclaration, labels: tuple[tuple[str, str], ...], counted: Mapping[str, float]
) -> Numbers:
    numbers, total = Numbers(), 0.0
    for bound in metric.bounds:
        total += counted.get(bound, 0.0)
        numbers[Series(f"{metric.name}_bucket", (*labels, ("le", bound)))] = total
    numbers[Series(f"{metric.name}_count", labels)] = total
    return numbers


class Meter:
    """Counts in this process. Thread-safe. Its size is bounded, since the values of labels are."""

    def __init__(self) -> None:
        self._counted: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """Add to a counter. Raises :class:`KeyError` for one that is not declared."""
        self._add({_field_of(_BY_NAME[name].name, *labels): by})

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Enter a value into a histogram. Raises :class:`KeyError` for one that is not declared."""
        self._add(_count_observation(_BY_NAME[name], value, labels))

    def take(self) -> dict[str, float]:
        """Return the counts since the last call."""
        with self._lock:
            counted, self._counted = self._counted, Counter()
        return dict(counted)

    def give_back(self, counted: Mapping[str, float]) -> None:
        """Count again the numbers that could not be stored."""
        self._add(counted)

    def _add(self, counted: Mapping[str, float]) -> None:
        with self._lock:
            for field, by in counted.items():
                self._counted[field] += by  # type: ignore[assignment]  # sums of seconds are fractions
