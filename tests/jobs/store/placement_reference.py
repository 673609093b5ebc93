"""Placement, written the slow and obvious way: one job after the other, in order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    id: str
    device: str
    ranks: int
    max_hosts: int
    priority: int
    waited_ms: int
    queued_at: int


@dataclass
class Room:
    """Devices of one host by pool."""

    name: str
    total: dict[str, int]
    free: dict[str, int]


def choose(room: dict[str, int], ranks: int, max_hosts: int) -> dict[str, int] | None:
    """Ranks by host: the fewest hosts, each but the last of them emptied in order of room; the last by best fit."""
    for hosts in range(1, max_hosts + 1):
        order = sorted(room, key=lambda name: (-room[name], name))
        emptied = order[: hosts - 1]
        rest = ranks - sum(room[name] for name in emptied)
        fitting = [name for name in order[hosts - 1 :] if room[name] >= rest]
        if fitting:
            last = min(fitting, key=lambda name: (room[name], name))
            return {**{name: room[name] for name in emptied}, last: rest}
    return None


def place(jobs: list[Waiting], fleet: list[Room], bound_ms: int) -> dict[str, tuple[str, dict[str, int]]]:
    """(pool, ranks by host) of each job that is placed."""
    has_cuda = any(host.total["cuda"] for host in fleet)
    placed: dict[str, tuple[str, dict[str, int]]] = {}
    reserved: set[str] = set()
    for job in sorted(jobs, key=lambda job: (-job.priority, job.queued_at, job.id)):
        pool = ("cuda" if has_cuda else "cpu") if job.device == "auto" else job.device
        if pool in reserved:
            continue
        shares = choose({host.name: host.free[pool] for host in fleet}, job.ranks, job.max_hosts)
        if shares is not None:
            placed[job.id] = (pool, shares)
            for host in fleet:
                host.free[pool] -= shares.get(host.name, 0)
        elif job.waited_ms >= bound_ms and could_ever(job, pool, fleet):
            reserved.add(pool)
    return placed


def could_ever(job: Waiting, pool: str, fleet: list[Room]) -> bool:
    return choose({host.name: host.total[pool] for host in fleet}, job.ranks, job.max_hosts) is not None


def fewest_hosts(room: list[int], ranks: int) -> int | None:
    """By trying every subset: how many hosts a gang needs at least."""
    for count in range(1, len(room) + 1):
        if any(sum(some) >= ranks for some in itertools.combinations(room, count)):
            return count
    return None
