"""Worker hosts, their devices and what runs on them."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from api.context import StoreDep
from api.security import Admin, Reader
from service.jobs.records import Host

router = APIRouter(tags=["hosts"])


class Hosts(BaseModel):
    items: list[Host]


@router.get("/hosts")
def list_hosts(key: Reader, store: StoreDep) -> Hosts:
    """List all hosts by name."""
    return Hosts(items=sorted(store.hosts.list(), key=lambda host: host.name))


@router.post("/hosts/{name}/drain")
def drain_host(name: str, key: Admin, store: StoreDep) -> Host:
    """Place nothing more on a host; what runs there goes on."""
    return store.hosts.drain(name)


@router.post("/hosts/{name}/resume")
def resume_host(name: str, key: Admin, store: StoreDep) -> Host:
    """Let a host take jobs again that was drained, or that is ``failing``: jobs placed on it did not start."""
    return store.hosts.resume(name)
