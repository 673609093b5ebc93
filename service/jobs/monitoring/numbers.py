"""Holds the values of metrics as Prometheus spells them: a histogram is its cumulative buckets, sum and count."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from service.jobs.monitoring.catalogue import COUNTS, MetricDeclaration

_SEPARATOR = "\t"
_BY_NAME = {metric.name: metric for metric in COUNTS}


class Series(NamedTuple):
    """Names one value: a metric, or a part of a histogram, and its labels in the order of the declaration."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


Numbers = dict[Series, float]


def field_of(name: str, *words: str) -> str:
    """Return the name of a count where all counts are kept (``lua/lib/counts.lua`` makes the same)."""
    return _SEPARATOR.join((name, *words))


def observed(metric: MetricDeclaration, value: float, labels: Sequence[str] = ()) -> dict[str, float]:
    """Return what one observation adds to the counts of a histogram."""
    bound = metric.bounds[bisect_left(metric.buckets, value)]
    return {field_of(f"{metric.name}_bucket", bound, *labels): 1, field_of(f"{metric.name}_sum", *labels): value}


def from_counts(counts: Mapping[str, str]) -> Numbers:
    """Return kept counts as numbers, with zeros where nothing was counted yet. What another version counts, and this
    one does not know, is left out.
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
