"""Serves liveness, readiness and numbers for Prometheus, outside ``/v1`` and without a key."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel

from api.callers import ContextDep
from service.jobs.host import ISOLATION_PARTS
from service.jobs.monitoring.catalogue import METRICS, MetricDeclaration
from service.jobs.monitoring.numbers import Numbers, Series
from service.jobs.records import TorchUsed

router = APIRouter(tags=["health"])


class Alive(BaseModel):
    status: str = "ok"


class Ready(BaseModel):
    status: str = "ready"
    broker_s: float
    """Seconds for a write to the broker and its read."""
    survives_power_loss: bool
    """Whether the broker syncs each write to its disk before it answers. Otherwise a loss of power takes up to
    about a second of accepted jobs and everything else."""
    hosts: int
    """Worker hosts that report."""
    isolation: dict[str, int]
    """How many of them keep ranks apart by each of ``limits``, ``files``, ``network``, ``broker``, ``memory``."""
    torch: tuple[TorchUsed, ...]
    """The versions of torch there."""


@router.get("/healthz")
async def check_health() -> Alive:
    """Confirm that the process answers."""
    return Alive()


@router.get("/readyz")
def check_readiness(context: ContextDep) -> Ready:
    """Confirm that the process can work: it wrote to the broker and read back. Otherwise 503."""
    store = context.probe
    broker_s = store.gauges.round_trip_s()
    alive = [host for host in store.hosts.list() if host.alive]
    isolation = Counter(part for host in alive for part in host.isolation)
    return Ready(
        broker_s=broker_s,
        survives_power_loss=store.survives_power_loss(),
        hosts=len(alive),
        isolation={part: isolation[part] for part in ISOLATION_PARTS},
        torch=tuple(dict.fromkeys(used for host in alive if (used := TorchUsed.of(host.versions)) is not None)),
    )


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def get_metrics(context: ContextDep) -> Response:
    """Return numbers for Prometheus. Gauges are read from the broker now, and counts are kept there for all
    processes together, so every API process answers the same.
    """
    return Response(exposition(context.monitor.numbers()), media_type=MEDIA_TYPE)


MEDIA_TYPE = CONTENT_TYPE_LATEST


def exposition(numbers: Numbers) -> bytes:
    """Return all declared metrics in Prometheus' text format. A metric without a value is 0 if its labels are known."""
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
