"""Keeps the state of record: everything that the service knows, in Redis, behind one facade with a class per noun.

Every change is one script in ``lua/``, called through a stub in ``stubs``; the classes turn arguments into JSON and
answers into records (``decode``). The rules are in ``lua/lib``: ``jobs`` (a job's state and events, and why it waits),
``queue`` and ``search`` (the pending jobs), ``fleet`` (where ``auto`` runs), ``devices`` (what parts hold), ``fencing``
(who may write), ``ending`` (how attempts and jobs end), ``health`` (hosts that start nothing). Placement is
``lua/place.lua``; what an operator or a test may set is :class:`~service.jobs.store_limits.StoreLimits`.
"""

from __future__ import annotations

from dataclasses import dataclass

import redis

from service.jobs.layout import DataLayout
from service.jobs.store.artifacts import ArtifactStore
from service.jobs.store.attempts import Attempts, parse_ref
from service.jobs.store.client import BrokerClient, StoreUnavailable
from service.jobs.store.events import EventPage, Events, StoredEvent
from service.jobs.store.files import Files, FileWriter, TooLarge
from service.jobs.store.gauges import Gauges
from service.jobs.store.hosts import HeartbeatReply, HostReport, HostStore
from service.jobs.store.jobs import JobFilter, Jobs
from service.jobs.store.keys import ApiKeys, Credential
from service.jobs.store.sessions import Sessions, SignIns
from service.jobs.store_limits import StoreLimits


@dataclass(frozen=True)
class Store:
    """Synchronous and safe to share between threads. Any call may raise :class:`StoreUnavailable`."""

    url: str
    client: BrokerClient
    jobs: Jobs
    attempts: Attempts
    hosts: HostStore
    events: Events
    artifacts: ArtifactStore
    files: Files
    keys: ApiKeys
    sessions: Sessions
    sign_ins: SignIns
    gauges: Gauges

    @classmethod
    def connect(cls, url: str, data: DataLayout, limits: StoreLimits | None = None) -> Store:
        """Return a store at ``url`` (``redis://…``, ``rediss://…``, ``unix://…``); it connects with its first call."""
        limits = limits or StoreLimits()
        client = BrokerClient(url)
        hosts = HostStore(client, limits)
        keys = ApiKeys(client)
        return cls(
            url=url,
            client=client,
            jobs=Jobs(client, limits, data, hosts),
            attempts=Attempts(client, limits),
            hosts=hosts,
            events=Events(client),
            artifacts=ArtifactStore(client, data),
            files=Files(client, data, limits.max_file_bytes),
            keys=keys,
            sessions=Sessions(client, keys, limits.session_idle_s, limits.session_s),
            sign_ins=SignIns(client),
            gauges=Gauges(client),
        )

    def survives_power_loss(self) -> bool:
        """Return whether what the broker has answered outlives a loss of power there: it syncs its append-only file
        before each answer. Under ``everysec`` up to about a second of answers is lost; ``WAITAOF`` does not help, since
        many releases answer it before the sync. ``False`` also where the broker does not tell.
        """
        if not self.client.call("INFO", "persistence")["aof_enabled"]:
            return False
        try:
            return "always" in self.client.call("CONFIG", "GET", "appendfsync")
        except redis.ResponseError:
            return False

    def close(self) -> None:
        self.client.close()


__all__ = [
    "ApiKeys",
    "ArtifactStore",
    "Attempts",
    "Credential",
    "EventPage",
    "Events",
    "FileWriter",
    "Files",
    "Gauges",
    "HeartbeatReply",
    "HostReport",
    "HostStore",
    "JobFilter",
    "Jobs",
    "Sessions",
    "SignIns",
    "Store",
    "StoreLimits",
    "StoreUnavailable",
    "StoredEvent",
    "TooLarge",
    "parse_ref",
]
