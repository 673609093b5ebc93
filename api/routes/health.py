"""Liveness, readiness and numbers for Prometheus; outside ``/v1``, without a key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel

from api.context import ContextDep, StoreDep
from service.jobs.records import ISOLATION_PARTS, Host
from service.jobs.store import Store

router = APIRouter(tags=["health"])


class Alive(BaseModel):
    status: str = "ok"


class Ready(BaseModel):
    status: str = "ready"
    broker_s: float
    """Seconds for a write to the broker and its read."""
    survives_power_loss: bool
    """Whether the broker syncs each write to its disk before it answers: else a loss of power there takes up to about a
    second of accepted jobs and of everything else."""
    hosts: int
    """Worker hosts that are heard of."""
    isolation: dict[str, int]
    """How many of them keep ranks apart by each of ``limits``, ``files``, ``network``, ``broker``."""


@router.get("/healthz")
def healthz() -> Alive:
    """Tell that the process answers."""
    return Alive()


@router.get("/readyz")
def readyz(store: StoreDep) -> Ready:
    """Tell that the process can do its work: it wrote to the broker and read back; 503 otherwise."""
    broker_s = store.gauges.round_trip_s()
    alive = [host for host in store.hosts.list() if host.alive]
    isolation = Counter(part for host in alive for part in host.isolation)
    return Ready(
        broker_s=broker_s,
        survives_power_loss=store.survives_power_loss(),
        hosts=len(alive),
        isolation={part: isolation[part] for part in ISOLATION_PARTS},
    )


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(context: ContextDep) -> Response:
    """Return numbers for Prometheus, read from the broker at each scrape, so that every API process says the same."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fleet(context.store, context.hub.open_streams))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _Fleet(Collector):
    def __init__(self, store: Store, streams: int) -> None:
        self._store = store
        self._streams = streams

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        hosts, gauges = self._store.hosts.list(), self._store.gauges
        yield _by("trivet_jobs", "Jobs by state", "state", gauges.jobs())
        yield _by("trivet_hosts", "Worker hosts", "state", _host_states(hosts))
        yield _by("trivet_devices", "Devices of live hosts", "pool", _devices(hosts))
        yield _by("trivet_devices_free", "Devices that wait for work", "pool", _free_devices(hosts))
        wait = gauges.oldest_wait_s()
        yield GaugeMetricFamily("trivet_queue_wait_seconds", "Longest present wait for devices", value=wait)
        yield GaugeMetricFamily("trivet_event_streams", "Open event streams of this process", value=self._streams)


def _by(name: str, documentation: str, label: str, values: Mapping[Any, int]) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _host_states(hosts: Iterable[Host]) -> dict[str, int]:
    counts = {"alive": 0, "draining": 0, "failing": 0, "lost": 0}
    for host in hosts:
        state = "draining" if host.draining else "failing" if host.failing else "alive"
        counts[state if host.alive else "lost"] += 1
    return counts


def _devices(hosts: Iterable[Host]) -> dict[str, int]:
    alive = [host for host in hosts if host.alive]
    return {"cuda": sum(len(host.cuda) for host in alive), "cpu": sum(host.cpu_slots for host in alive)}


def _free_devices(hosts: Iterable[Host]) -> dict[str, int]:
    alive = [host for host in hosts if host.alive]
    return {pool: sum(len(host.free.get(pool, ())) for host in alive) for pool in ("cuda", "cpu")}
