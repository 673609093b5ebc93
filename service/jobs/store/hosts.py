"""Keeps the worker hosts: their devices, the jobs on them, and whether they report."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import orjson

from service.jobs.records import (
    AllocatedDevices,
    AttemptRef,
    FailingHost,
    FleetCapacity,
    Holding,
    Host,
    NotFound,
    Overcommitment,
)
from service.jobs.records.store_limits import StoreLimits
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.decode import json_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class HostReport:
    """Describes a host as it reports itself with each heartbeat; ``live`` names the attempts supervised there,
    ``job:attempt``.
    """

    name: str
    address: str
    cuda: tuple[str, ...] = ()
    cpu_slots: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    live: tuple[str, ...] = ()
    isolation: tuple[str, ...] = ()
    """The isolation of ranks from the host and from other jobs: parts of
    :data:`service.jobs.host.ISOLATION_PARTS`.
    """
    launchers: dict[str, str] = field(default_factory=dict)
    """The launchers that this worker serves, each with its account of its devices."""
    allocation: AllocatedDevices | None = None
    """Devices that a launcher got for one job. Placement does not see them: the host declares none of its own."""
    overcommitted: Overcommitment | None = None
    threads: dict[str, int] = field(default_factory=dict)
    """Threads with which a rank on one device computes there, by pool."""

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ValueError(f"host name {self.name!r}: letters, digits, '.', '_' and '-', 200 at most")
        if self.cpu_slots < 0:
            raise ValueError(f"cpu_slots is {self.cpu_slots}; expected 0 or more")


@dataclass(frozen=True)
class HeartbeatReply:
    """Answers a heartbeat. ``kill``: attempts supervised there that are no longer current."""

    drain: bool
    kill: tuple[AttemptRef, ...]


@dataclass(frozen=True)
class HostStore:
    """Keeps the fleet. A host's free set is always its declared devices less those that parts on it hold."""

    client: BrokerClient
    limits: StoreLimits

    def beat(self, report: HostReport) -> HeartbeatReply:
        """Register or refresh a host. Devices of a lost attempt are freed here, once ``live`` no longer names it."""
        drain, *kill = stubs.beat(
            self.client,
            limits=self.limits.script_argument,
            host=report.name,
            address=report.address,
            cuda=json_of(report.cuda),
            cuda_count=len(report.cuda),
            cpu_slots=report.cpu_slots,
            versions=json_of(report.versions),
            threads=json_of(report.threads),
            isolation=json_of(report.isolation),
            launchers=json_of(report.launchers),
            allocation="null" if report.allocation is None else report.allocation.model_dump_json(),
            overcommitted="null" if report.overcommitted is None else report.overcommitted.model_dump_json(),
            clock_ms=round(time.time() * 1000),
            live=json_of(report.live),
        )
        return HeartbeatReply(drain == "1", tuple(_attempt(name, report.name) for name in kill))

    def leave(self, name: str) -> None:
        """Sign a host off: it gets no more work, its attempts continue, and its record is deleted when it holds
        nothing.
        """
        stubs.leave(self.client, self.limits.script_argument, name)

    def list(self) -> list[Host]:
        return [_host(*entry) for entry in stubs.list_hosts(self.client, self.limits.script_argument, "")]

    def drain(self, name: str) -> Host:
        """Give it no more work; its attempts continue. Raises :class:`NotFound`."""
        stubs.drain(self.client, self.limits.script_argument, name, "1")
        return self._get(name)

    def resume(self, name: str) -> Host:
        """Undo :meth:`drain`, and forget the failures of a host."""
        stubs.drain(self.client, self.limits.script_argument, name, "0")
        return self._get(name)

    def capacity(self) -> FleetCapacity | None:
        """Count the declared devices of the reporting hosts; ``None`` if they have none."""
        devices: Counter[str] = Counter()
        packages: set[str] = set()
        has_cuda_for_auto = False
        for alive, record, *_ in stubs.list_hosts(self.client, self.limits.script_argument, ""):
            fields = decode.fields_of(record)
            if alive == "1":
                devices.update({"cuda": len(orjson.loads(fields["cuda"])), "cpu": int(fields["devices:cpu"])})
                packages |= orjson.loads(fields["versions"]).keys()
            has_cuda_for_auto = has_cuda_for_auto or "draws_auto_to_cuda" in fields
        present = {pool: count for pool, count in devices.items() if count}
        if not present:
            return None
        auto_pool: Literal["cuda", "cpu"] = "cuda" if has_cuda_for_auto else "cpu"
        return FleetCapacity(devices=present, auto_pool=auto_pool, packages=frozenset(packages))

    def _get(self, name: str) -> Host:
        for entry in stubs.list_hosts(self.client, self.limits.script_argument, name):
            return _host(*entry)
        raise NotFound(f"there is no host {name}")


def free_devices(hosts: Collection[Host]) -> dict[str, dict[str, int]]:
    """Return the number of free devices by pool and host."""
    return {pool: {host.name: len(host.free.get(pool, ())) for host in hosts} for pool in ("cuda", "cpu")}


def _attempt(name: str, host: str) -> AttemptRef:
    job_id, _, attempt = name.rpartition(":")
    return AttemptRef(job_id, int(attempt), host)


def _host(alive: str, flat: list[str], cuda: list[str], cpu: list[str], held: list[str]) -> Host:
    fields = decode.fields_of(flat)
    holdings = sorted(
        (_holding(*part) for part in decode.fields_of(held).items()), key=lambda one: (one.job or "", one.attempt)
    )
    allocation = orjson.loads(fields.get("allocation", "null"))
    host = Host(
        name=fields["name"],
        alive=alive == "1",
        draining="draining" in fields,
        address=fields["address"],
        cuda=orjson.loads(fields["cuda"]),
        cpu_slots=int(fields["devices:cpu"]),
        free={"cuda": tuple(sorted(map(int, cuda))), "cpu": tuple(sorted(map(int, cpu)))},
        running=tuple(dict.fromkeys(holding.job for holding in holdings if holding.job)),
        held=tuple(holdings),
        failing=_failing(fields),
        overcommitted=orjson.loads(fields.get("overcommitted", "null")),
        clock_skew_s=int(fields.get("clock_skew_ms", "0")) / 1000,
        seen_at=decode.moment(fields["seen_at"]),
        versions=orjson.loads(fields["versions"]),
        isolation=orjson.loads(fields.get("isolation", "[]")),
        launchers=orjson.loads(fields.get("launchers", "{}")),
    )
    return host if allocation is None else _with_allocation(host, AllocatedDevices.model_validate(allocation))


def _with_allocation(host: Host, has: AllocatedDevices) -> Host:
    """Return a host of an allocation, which has the allocation's devices and declares none to placement."""
    held = {device for holding in host.held for device in holding.devices}
    free = tuple(device for device in range(has.devices) if device not in held)
    changes = {
        "draining": False,
        "cuda": ("CUDA device",) * has.devices if has.pool == "cuda" else (),
        "cpu_slots": has.devices if has.pool == "cpu" else 0,
        "free": {"cuda": (), "cpu": (), has.pool: free},
        "failing": None,
        "allocation": has,
    }
    return host.model_copy(update=changes)


def _failing(fields: dict[str, str]) -> FailingHost | None:
    if "failing_since" not in fields:
        return None
    return FailingHost(
        reason=fields["failing_reason"],
        since=decode.moment(fields["failing_since"]),
        failed_starts=int(fields["failed_starts"]),
        retry_in_s=int(fields["retry_in_ms"]) / 1000,
    )


def _holding(name: str, text: str) -> Holding:
    job_id, _, attempt = name.rpartition(":")
    part = orjson.loads(text)
    return Holding(
        job=job_id,
        attempt=int(attempt),
        pool=part["pool"],
        devices=tuple(sorted(part["devices"])),
        lost=bool(part.get("orphan")),
    )
