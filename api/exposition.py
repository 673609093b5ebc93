"""Writes numbers in Prometheus' text format, as the catalogue declares them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from service.jobs.monitoring.catalogue import METRICS, MetricDeclaration
from service.jobs.monitoring.numbers import Numbers, Series

MEDIA_TYPE = CONTENT_TYPE_LATEST


def exposition(numbers: Numbers) -> bytes:
    """Return the text of all declared metrics: those without a value at 0, as far as their labels are known ahead."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_DeclaredMetrics(numbers))
    return generate_latest(registry)


class _DeclaredMetrics(Collector):
    def __init__(self, numbers: Numbers) -> None:
        self._by_name: defaultdict[str, list[tuple[Series, float]]] = defaultdict(list)
        for series, value in numbers.items():
            self._by_name[series.name].append((series, value))

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for metric in METRICS:
            family = Metric(metric.name.removesuffix("_total"), metric.meaning, metric.kind)
            known = dict.fromkeys(metric.values, 0.0)
            for name in _sample_names(metric):
                for series, value in self._by_name[name]:
                    family.add_sample(name, dict(series.labels), value)
                    known.pop(dict(series.labels).get(metric.labels[0], "") if metric.values else "", None)
            for label, value in known.items():
                family.add_sample(metric.name, {metric.labels[0]: label}, value)
            yield family


def _sample_names(metric: MetricDeclaration) -> tuple[str, ...]:
    if metric.kind == "histogram":
        return tuple(f"{metric.name}_{part}" for part in ("bucket", "count", "sum"))
    return (metric.name,)
