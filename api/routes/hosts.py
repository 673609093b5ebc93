"""Serves worker hosts, their devices and the jobs on them."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.callers import Admin, Caller, Reader, StoreDep, audit
from service.jobs.records import Holding, Host, Overcommitment
from service.jobs.store import Store

router = APIRouter(tags=["hosts"])

_REASON = "parts of jobs that were placed here did not start"
"""Why a host is failing, without the error of a job there."""


class Hosts(BaseModel):
    items: list[Host]


@router.get("/hosts")
def list_hosts(key: Reader, store: StoreDep) -> Hosts:
    """List all hosts by name. For jobs that the key may not read, only their devices are shown as held."""
    return Hosts(
        items=sorted((_host_as_seen(key, store, host) for host in store.hosts.list()), key=lambda host: host.name)
    )


def _host_as_seen(caller: Caller, store: Store, host: Host) -> Host:
    """Return a host without the jobs that the caller may not read: their devices only count as held."""
    if caller.project is None:
        return host
    allocation = host.allocation
    computing = () if host.overcommitted is None else host.overcommitted.by
    others = [one.job for one in (allocation, *computing) if one is not None and one.job is not None]
    named = tuple(dict.fromkeys((*host.running, *others)))
    visible = store.jobs.visible_among(caller.project, named)
    return host.model_copy(
        update={
            "running": tuple(job_id for job_id in host.running if job_id in visible),
            "held": tuple(
                one if one.job in visible else Holding(job=None, attempt=0, pool=one.pool, devices=one.devices)
                for one in host.held
            ),
            "allocation": allocation
            and allocation.model_copy(update={"job": allocation.job if allocation.job in visible else None}),
            "failing": host.failing and host.failing.model_copy(update={"reason": _REASON}),
            "overcommitted": host.overcommitted and _without_others(host.overcommitted, visible),
        }
    )


def _without_others(found: Overcommitment, visible: Collection[str]) -> Overcommitment:
    """Return the threads of those jobs that the caller may read by name, and all others without."""
    by = (one if one.job in visible else one.model_copy(update={"job": None, "program": ""}) for one in found.by)
    return found.model_copy(update={"by": tuple(by)})


@router.post("/hosts/{name}/drain")
def drain_host(name: str, request: Request, key: Admin, store: StoreDep) -> Host:
    """Place nothing more on a host; its running jobs go on."""
    host = store.hosts.drain(name)
    audit(request, "host.drain", subject=name)
    return host


@router.post("/hosts/{name}/resume")
def resume_host(name: str, request: Request, key: Admin, store: StoreDep) -> Host:
    """Let a drained or ``failing`` host take jobs again. On a failing host, placed jobs did not start."""
    host = store.hosts.resume(name)
    audit(request, "host.resume", subject=name)
    return host
