"""Liveness, readiness and numbers for Prometheus; outside ``/v1``, without a key."""

from __future__ import annotations

from collections import Counter

from fastapi import APIRouter, Response
from pydantic import BaseModel

from api.context import ContextDep
from api.exposition import MEDIA_TYPE, exposition
from service.jobs.records import ISOLATION_PARTS

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
    """How many of them keep ranks apart by each of ``limits``, ``files``, ``network``, ``broker``, ``memory``."""


@router.get("/healthz")
async def check_health() -> Alive:
    """Tell that the process answers."""
    return Alive()


@router.get("/readyz")
def check_readiness(context: ContextDep) -> Ready:
    """Tell that the process can do its work: it wrote to the broker and read back; 503 otherwise."""
    store = context.probe
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
def get_metrics(context: ContextDep) -> Response:
    """Return numbers for Prometheus. Gauges are read from the broker now, and counts are kept there for all processes
    together, so that every API process says the same.
    """
    return Response(exposition(context.monitor.numbers()), media_type=MEDIA_TYPE)
