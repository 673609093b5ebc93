"""Worker hosts, their devices and what runs on them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.access import host_as_seen
from api.audit import audit
from api.context import StoreDep
from api.security import Admin, Reader
from service.jobs.records import Host

router = APIRouter(tags=["hosts"])


class Hosts(BaseModel):
    items: list[Host]


@router.get("/hosts")
def list_hosts(key: Reader, store: StoreDep) -> Hosts:
    """List all hosts by name. Of jobs that the key may not read, only the devices are told that they hold."""
    return Hosts(
        items=sorted((host_as_seen(key, store, host) for host in store.hosts.list()), key=lambda host: host.name)
    )


@router.post("/hosts/{name}/drain")
def drain_host(name: str, request: Request, key: Admin, store: StoreDep) -> Host:
    """Place nothing more on a host; what runs there goes on."""
    host = store.hosts.drain(name)
    audit(request, "host.drain", subject=name)
    return host


@router.post("/hosts/{name}/resume")
def resume_host(name: str, request: Request, key: Admin, store: StoreDep) -> Host:
    """Let a host take jobs again that was drained, or that is ``failing``: jobs placed on it did not start."""
    host = store.hosts.resume(name)
    audit(request, "host.resume", subject=name)
    return host
