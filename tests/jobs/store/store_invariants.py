"""What must hold of the keys after every call, read from the server itself in one round trip."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import orjson
import redis as redis_py
from store_model import OPEN, Model

from service.jobs.records import AttemptRef
from service.jobs.spec.common import MOVES
from service.jobs.store import parse_ref
from service.jobs.store.keyspace import (
    HOST,
    HOST_FREE,
    HOST_PARTS,
    HOSTS,
    JOB,
    JOB_EVENTS,
    JOB_PARTS,
    JOBS,
    JOBS_BY,
    KEYS,
    LEASES,
    OUTBOX,
    PENDING,
    PENDING_NODE,
    PENDING_SLICE,
    USES,
    Key,
)

_READ_ALL = """
local read = {
  string = function(key) return redis.call("GET", key) end,
  hash = function(key) return redis.call("HGETALL", key) end,
  list = function(key) return redis.call("LRANGE", key, 0, -1) end,
  set = function(key) return redis.call("SMEMBERS", key) end,
  zset = function(key) return redis.call("ZRANGE", key, 0, -1, "WITHSCORES") end,
  stream = function(key) return redis.call("XRANGE", key, "-", "+") end,
}
local found = {}
for _, key in ipairs(redis.call("KEYS", "*")) do
  found[#found + 1] = { key, redis.call("PTTL", key), read[redis.call("TYPE", key).ok](key) }
end
return found
"""


class Snapshot:
    """Everything in the database at one moment."""

    def __init__(self, redis: redis_py.Redis) -> None:
        found: Any = redis.eval(_READ_ALL, 0)
        self.ttl = {key.decode(): ttl for key, ttl, _ in found}
        self._values = {key.decode(): _decoded(value) for key, _, value in found}

    def members(self, key: str) -> set[str]:
        return set(self._values.get(key, []))

    def pairs(self, key: str) -> dict[str, str]:
        """A hash, or the members and scores of a sorted set."""
        flat = self._values.get(key, [])
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def state_events(self, job_id: str) -> list[Any]:
        entries = [fields for _, fields in self._values.get(JOB_EVENTS(job_id), [])]
        return [orjson.loads(data) for _, kind, _, data in entries if kind == "state"]

    def family(self, key: Key) -> list[str]:
        """The names of all keys of a family."""
        return [name for name in self.ttl if key in _families(name)]

    def strays(self) -> list[str]:
        """Keys of no known family, and keys that should expire and do not."""
        return [name for name, ttl in self.ttl.items() if not _is_known(name, ttl)]


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    return value.decode() if isinstance(value, bytes) else value


@lru_cache(10_000)
def _families(name: str) -> tuple[Key, ...]:
    return tuple(key for key in KEYS if key.pattern.fullmatch(name))


def _is_known(name: str, ttl: int) -> bool:
    return any(key.lifetime == "permanent" or ttl >= 0 for key in _families(name))


def held_devices(now: Snapshot) -> dict[tuple[str, str, int], str]:
    """(host, pool, device) → job:attempt; fails when two parts hold the same device."""
    held: dict[tuple[str, str, int], str] = {}
    for host in now.pairs(HOSTS()):
        for name, text in now.pairs(HOST_PARTS(host)).items():
            part = orjson.loads(text)
            for device in part["devices"]:
                place = (host, part["pool"], device)
                assert place not in held, f"{place} is held by {held[place]} and {name}"
                held[place] = name
    return held


def check_devices(now: Snapshot, processes: Mapping[AttemptRef, tuple[str, tuple[int, ...]]]) -> None:
    """Free = declared less held, and no device of a living process is free or held by another."""
    held = held_devices(now)
    for host in now.pairs(HOSTS()):
        for pool in ("cuda", "cpu"):
            count = int(now.pairs(HOST(host))[f"devices:{pool}"])
            declared = {(host, pool, device) for device in range(count)}
            free = {(host, pool, int(device)) for device in now.members(HOST_FREE(host, pool))}
            assert free == declared - set(held), f"{host} {pool}"
    for ref, (pool, devices) in processes.items():
        for device in devices:
            assert held.get((ref.host, pool, device)) == f"{ref.job_id}:{ref.attempt}", f"{ref} on {pool} {device}"


def check_uses(now: Snapshot) -> None:
    """Each project is charged for what its parts hold, but for what was written off, and for nothing else."""
    parts = [orjson.loads(text) for host in now.pairs(HOSTS()) for text in now.pairs(HOST_PARTS(host)).values()]
    held: Counter[str] = Counter()
    for part in parts:
        assert "project" in part or part.get("orphan")
        if "project" in part:
            held[part["project"]] += len(part["devices"])
    charged = {project: int(use.split()[1]) for project, use in now.pairs(USES()).items()}
    assert {project: count for project, count in charged.items() if count} == dict(held)


def check_jobs(now: Snapshot, model: Model) -> None:
    """Hash, index, stream and model agree; the stream only made allowed moves; what failed says why."""
    assert set(now.pairs(JOBS())) == set(model.jobs)
    for job in model.jobs.values():
        record = now.pairs(JOB(job.id))
        state, attempt = record["state"], int(record["attempt"])
        assert (state, attempt) == (job.state, job.number), job
        assert (state == "failed") == ("error" in record), job
        assert state != "failed" or orjson.loads(record["error"])["message"], job
        told = now.state_events(job.id)
        assert (told[-1]["state"], told[-1]["attempt"]) == (state, attempt)
        for before, after in itertools.pairwise(event["state"] for event in told):
            assert after in MOVES[before]
    for indexed in MOVES:
        assert set(now.pairs(JOBS_BY(f"state:{indexed}"))) == {job.id for job in model.in_state(indexed)}


def check_queue(now: Snapshot, model: Model) -> None:
    """Pending are exactly the queued jobs that wait for no other; the slices hold the same, and every node of the
    index the first jobs of the slices in its square."""
    pending = now.pairs(PENDING())
    assert set(pending) == {job.id for job in model.jobs.values() if model.is_pending(job)}
    slices: dict[tuple[str, str], dict[str, str]] = {}
    for job_id, score in pending.items():
        record = now.pairs(JOB(job_id))
        device, rest = record["shape"].split(":", 1)
        group = f"{device}@{record['avoid']}" if "avoid" in record else device
        slices.setdefault((f"{group}:{rest}", record["priority"]), {})[job_id] = score
    nodes: dict[str, dict[str, str]] = {}
    for (shape, priority), members in slices.items():
        assert now.pairs(PENDING_SLICE(shape, priority)) == members
        group, ranks, hosts = shape.split(":")
        head = min(members, key=lambda job_id: (float(members[job_id]), job_id))
        for level in range(9):
            square = [(int(number) - 1) // 4 ** (8 - level) for number in (hosts, ranks)]
            node = PENDING_NODE(group, str(level), *map(str, square))
            nodes.setdefault(node, {})[head] = members[head]
    assert {key: now.pairs(key) for key in now.family(PENDING_NODE)} == nodes
    assert len(now.family(PENDING_SLICE)) == len(slices)


def check_parts(now: Snapshot, model: Model) -> None:
    """Exactly the open parts have a lease, exactly the unclaimed ones an outbox entry."""
    open_parts = {
        str(AttemptRef(job.id, job.number, host)): status
        for job in model.jobs.values()
        if job.attempt
        for host, status in job.attempt.parts.items()
        if status in OPEN
    }
    assert set(now.pairs(LEASES())) == set(open_parts)
    assert set(now.pairs(OUTBOX())) == {name for name, status in open_parts.items() if status == "starting"}
    for name, status in open_parts.items():
        ref = parse_ref(name)
        assert now.pairs(JOB_PARTS(ref.job_id))[ref.host] == status
