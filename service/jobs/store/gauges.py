"""Measures the service for monitoring, sums the counts of all processes, and keeps the samples that alerts read."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import orjson

from service.jobs.kinds.registry import KINDS
from service.jobs.monitoring.alerts import REMEMBERED_S, WATCHED
from service.jobs.monitoring.catalogue import OPEN_STATES, POOLS
from service.jobs.monitoring.conditions import Moment
from service.jobs.monitoring.numbers import Meter, Numbers, Series, from_counts
from service.jobs.records import Host
from service.jobs.records.store_limits import StoreLimits
from service.jobs.spec.common import STATES, JobState
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient, StoreUnavailable
from service.jobs.store.decode import json_of
from service.jobs.store.hosts import HostStore
from service.jobs.store.keys import ApiKeys
from service.jobs.store.keyspace import COUNTS, JOBS_BY, LEASES, OUTBOX, PREFIX, SAMPLES, SAMPLING


@dataclass(frozen=True)
class Counts:
    """Adds and reads counts. The scripts add their own."""

    client: BrokerClient

    def add(self, meter: Meter) -> None:
        """Add the counts of a process.

        While the broker is away the meter keeps them; raises :class:`StoreUnavailable`. A call whose answer was lost
        may have been counted, and is counted again: rather twice than not at all.
        """
        counted = meter.take()
        if not counted:
            return
        try:
            stubs.add_counts(self.client, json_of(counted))
        except StoreUnavailable:
            meter.give_back(counted)
            raise

    def numbers(self) -> Numbers:
        """Return the sums over all processes, since the data folder was made."""
        return from_counts(self.client.call("HGETALL", COUNTS()))


_KEY_WARNING = timedelta(days=7)
"""The time before its end during which a key counts as about to expire."""
_MOST_HOSTS = 1000
"""The most hosts that have series of their own, in the order of their names."""


@dataclass(frozen=True)
class Gauges:
    """Read at each scrape; the process keeps nothing, so all API processes give the same values."""

    client: BrokerClient
    limits: StoreLimits
    hosts: HostStore
    counts: Counts
    keys: ApiKeys

    def numbers(self) -> Numbers:
        """Return the values of all metrics except those of one process. Raises :class:`StoreUnavailable`."""
        numbers = (
            self.counts.numbers() | self._keys() | self._jobs() | self._queue() | self._dispatch() | self._broker()
        )
        return numbers | _fleet(self.hosts.list(), self.now_s())

    def now_s(self) -> float:
        """Return the broker's time of day, in Unix seconds: the same for every process."""
        seconds, microseconds = self.client.call("TIME")
        return int(seconds) + int(microseconds) / 1e6

    def jobs(self) -> dict[JobState, int]:
        return {state: int(self.client.call("ZCARD", JOBS_BY(f"state:{state}"))) for state in STATES}

    def round_trip_s(self) -> float:
        """Write a value and read it back; return the seconds that this took. Raises :class:`StoreUnavailable`."""
        key, value = f"{PREFIX}ready:{secrets.token_hex(8)}", secrets.token_hex(8)
        started = time.monotonic()
        self.client.call("SET", key, value, "PX", 1000)
        if self.client.call("GETDEL", key) != value:
            raise StoreUnavailable("the broker did not return what was written")
        return time.monotonic() - started

    def _jobs(self) -> Numbers:
        jobs = self.jobs()
        numbers = {_series("trivet_jobs", state=state): float(count) for state, count in jobs.items()}
        for state in OPEN_STATES:
            for kind in KINDS.provided if jobs[state] else ():
                both = self.client.call("ZINTERCARD", 2, JOBS_BY(f"state:{state}"), JOBS_BY(f"kind:{kind}"))
                numbers[_series("trivet_active_jobs", kind=kind, state=state)] = float(both)
        return numbers

    def _keys(self) -> Numbers:
        """Count the keys that someone has to replace; a person's is made anew at each sign-in."""
        now = decode.moment(self.now_s() * 1000)
        held = (key for key in self.keys.list() if key.holder == "key" and key.successor is None)
        ends = [key.expires_at for key in held if key.expires_at is not None]
        expiring = sum(now < end <= now + _KEY_WARNING for end in ends)
        return {Series("trivet_keys_expiring"): float(expiring)}

    def _queue(self) -> Numbers:
        numbers = {Series("trivet_queue_wait_seconds"): stubs.oldest_wait(self.client) / 1000}
        for device, jobs, wait_ms in stubs.queue_depths(self.client):
            numbers[_series("trivet_pending_jobs", device=device)] = float(jobs)
            numbers[_series("trivet_pending_oldest_seconds", device=device)] = int(wait_ms) / 1000
        return numbers

    def _dispatch(self) -> Numbers:
        return {
            Series("trivet_outbox_parts"): float(self.client.call("ZCARD", OUTBOX())),
            Series("trivet_outbox_oldest_seconds"): stubs.oldest_dispatch(self.client, self.limits.script_argument)
            / 1000,
            Series("trivet_leases"): float(self.client.call("ZCARD", LEASES())),
        }

    def _broker(self) -> Numbers:
        round_trip_s = self.round_trip_s()
        info = {
            name: value
            for section in ("memory", "persistence", "clients", "stats")
            for name, value in self.client.call("INFO", section).items()
        }
        ok = {name: info.get(name, "ok") == "ok" for name in ("aof_last_write_status", "aof_last_bgrewrite_status")}
        saved = info.get("rdb_last_bgsave_status", "ok") == "ok"
        return {
            Series("trivet_broker_round_trip_seconds"): round_trip_s,
            Series("trivet_broker_memory_bytes"): float(info["used_memory"]),
            Series("trivet_broker_memory_limit_bytes"): float(
                info.get("maxmemory") or info.get("total_system_memory") or 0
            ),
            Series("trivet_broker_append_only"): float(info.get("aof_enabled", 0)),
            Series("trivet_broker_append_only_ok"): float(ok["aof_last_write_status"]),
            Series("trivet_broker_rewrite_ok"): float(ok["aof_last_bgrewrite_status"] and saved),
            Series("trivet_broker_fork_seconds"): max(0, int(info.get("latest_fork_usec", 0))) / 1e6,
            Series("trivet_broker_clients"): float(info.get("connected_clients", 0)),
        }


def _series(name: str, **labels: str) -> Series:
    return Series(name, tuple(labels.items()))


def _fleet(hosts: Sequence[Host], now: float) -> Numbers:
    alive = [host for host in hosts if host.alive]
    numbers = {_series("trivet_hosts", state=state): 0.0 for state in ("alive", "draining", "failing", "lost")}
    for host in hosts:
        numbers[_series("trivet_hosts", state=host.state)] += 1
    for pool in POOLS:
        numbers[_series("trivet_devices", pool=pool)] = float(sum(_devices(host)[pool] for host in alive))
        free = sum(len(host.free.get(pool, ())) for host in alive)
        numbers[_series("trivet_devices_free", pool=pool)] = float(free)
    for host in sorted(hosts, key=lambda each: each.name)[:_MOST_HOSTS]:
        numbers |= dict(_of_host(host, now))
    return numbers


def _devices(host: Host) -> dict[str, int]:
    return {"cuda": len(host.cuda), "cpu": host.cpu_slots}


def _of_host(host: Host, now: float) -> Iterator[tuple[Series, float]]:
    age = max(0.0, now - host.seen_at.timestamp())
    yield _series("trivet_host_heartbeat_age_seconds", host=host.name), age
    yield _series("trivet_host_clock_skew_seconds", host=host.name), host.clock_skew_s
    yield _series("trivet_host_failing", host=host.name), float(host.failing is not None)
    for pool, count in _devices(host).items():
        if count:
            lost = sum(len(part.devices) for part in host.held if part.lost and part.pool == pool)
            free = len(host.free.get(pool, ()))
            for state, devices in (("free", free), ("held", max(0, count - free - lost)), ("lost", lost)):
                yield _series("trivet_host_devices", host=host.name, pool=pool, state=state), float(devices)


SAMPLE_S = 30.0
_KEPT = round(REMEMBERED_S / SAMPLE_S)


@dataclass(frozen=True)
class SampleStore:
    """Takes one sample in :data:`SAMPLE_S`, in whichever process is first; old ones are dropped."""

    client: BrokerClient

    def is_due(self) -> bool:
        """Return whether the caller is to take the next sample: true for one process in each period."""
        return bool(self.client.call("SET", SAMPLING(), 1, "NX", "PX", round(SAMPLE_S * 1000)))

    def record(self, moment: Moment) -> None:
        """Keep the numbers that alerts read, and drop the oldest sample."""
        watched = [(*series, value) for series, value in moment.numbers.items() if series.name in WATCHED]
        self.client.call("RPUSH", SAMPLES(), orjson.dumps({"at": moment.at, "numbers": watched}))
        self.client.call("LTRIM", SAMPLES(), -_KEPT, -1)

    def history(self) -> list[Moment]:
        """Return the kept samples by time. Those later than the last are from before a clock was set back."""
        moments = [_moment(orjson.loads(text)) for text in self.client.call("LRANGE", SAMPLES(), 0, -1)]
        last = moments[-1].at if moments else 0.0
        return sorted((each for each in moments if each.at <= last), key=lambda each: each.at)


def _moment(entry: dict[str, object]) -> Moment:
    numbers: Numbers = {}
    listed = entry["numbers"]
    assert isinstance(listed, list)
    for name, labels, value in listed:
        numbers[Series(name, tuple((label, text) for label, text in labels))] = value
    at = entry["at"]
    assert isinstance(at, float | int)
    return Moment(float(at), numbers)
