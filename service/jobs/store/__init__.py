"""Keeps the state of record: everything that the service knows, in Redis, behind one facade with a class per noun.

Every change is one script in ``lua/``, called through a stub in ``stubs``; the classes turn arguments into JSON and
answers into records (``decode``). The rules are in ``lua/lib``: ``jobs`` (a job's state and events, and why it waits),
``queue`` and ``search`` (the pending jobs), ``fleet`` (where ``auto`` runs), ``devices`` (what parts hold), ``fencing``
(who may write), ``ending`` (how attempts and jobs end), ``health`` (hosts that start nothing), ``members`` (who is in a
project), ``sharing`` (what other projects may read). Placement is ``lua/place.lua``; what an operator or a test may set
is :class:`~service.jobs.records.store_limits.StoreLimits`.
"""

from __future__ import annotations

from dataclasses import dataclass

import redis

from service.jobs.files import DataLayout
from service.jobs.files.objects import ObjectStore
from service.jobs.records.store_limits import StoreLimits
from service.jobs.spec.common import PendingLaunch
from service.jobs.store.artifacts import ArtifactStore
from service.jobs.store.attempts import Attempts, KnownJob, Launching, Preemptions, parse_ref
from service.jobs.store.audit import AuditFilter, AuditLog
from service.jobs.store.audit_files import AuditFiles
from service.jobs.store.client import BrokerCannotWrite, BrokerClient, BrokerRefused, StoreUnavailable
from service.jobs.store.exports import Exports
from service.jobs.store.files import Files, FileWriter, TooLarge, UploadedBy
from service.jobs.store.gauges import Counts, Gauges, SampleStore
from service.jobs.store.hosts import HostReport, HostStore
from service.jobs.store.jobs import Jobs
from service.jobs.store.keys import ApiKeys, Credential
from service.jobs.store.listing import JobFilter, Listing
from service.jobs.store.loop_calls import in_loop
from service.jobs.store.outage import BrokerTimeouts
from service.jobs.store.projects import Projects, ServiceAccounts
from service.jobs.store.queue import Queue, Shares
from service.jobs.store.sessions import Sessions, SignInFlow, SignInFlows, SignIns
from service.jobs.store.submission import Submission
from service.jobs.store.sweeps import Sweeps
from service.jobs.store.tail import Events
from service.jobs.store.webhooks import Webhooks


@dataclass(frozen=True)
class Store:
    """Synchronous and thread-safe; :func:`in_loop` makes a call from an event loop, without a thread.
    Any call may raise :class:`StoreUnavailable`.
    """

    url: str
    client: BrokerClient
    jobs: Jobs
    listing: Listing
    sweeps: Sweeps
    queue: Queue
    shares: Shares
    preemptions: Preemptions
    launching: Launching
    attempts: Attempts
    hosts: HostStore
    events: Events
    artifacts: ArtifactStore
    files: Files
    projects: Projects
    keys: ApiKeys
    accounts: ServiceAccounts
    sessions: Sessions
    sign_ins: SignIns
    sign_in_flows: SignInFlows
    counts: Counts
    gauges: Gauges
    webhooks: Webhooks
    exports: Exports
    audit: AuditLog
    samples: SampleStore

    @classmethod
    def connect(
        cls, url: str, data: DataLayout, limits: StoreLimits | None = None, timeouts: BrokerTimeouts | None = None
    ) -> Store:
        """Return a store at ``url`` (``redis://…``, ``rediss://…``, ``unix://…``); it connects with its first call."""
        limits = limits or StoreLimits()
        client = BrokerClient(url, timeouts)
        hosts = HostStore(client, limits)
        objects = None if limits.objects is None else ObjectStore(limits.objects)
        artifacts = ArtifactStore(client, data, objects)
        jobs = Jobs(client, limits, data, hosts, artifacts)
        max_key_s = None if limits.max_key_days is None else limits.max_key_days * 86_400
        keys, counts = ApiKeys(client, max_key_s), Counts(client)
        shares = Shares(client, limits)
        return cls(
            url=url,
            client=client,
            jobs=jobs,
            listing=Listing(client, limits),
            sweeps=Sweeps(client, limits, jobs),
            queue=Queue(client, limits, hosts, shares),
            shares=shares,
            preemptions=Preemptions(client, limits, hosts),
            launching=Launching(client, limits),
            attempts=Attempts(client, limits),
            hosts=hosts,
            events=Events(client),
            artifacts=artifacts,
            files=Files(client, data, limits.max_file_bytes, limits.keep_uploads_days, objects),
            projects=Projects(client, limits),
            keys=keys,
            accounts=ServiceAccounts(client, keys),
            sessions=Sessions(client, keys, limits.session_idle_s, limits.session_s),
            sign_ins=SignIns(client),
            sign_in_flows=SignInFlows(client),
            counts=counts,
            gauges=Gauges(client, limits, hosts, counts, keys),
            webhooks=Webhooks(client),
            exports=Exports(client, limits),
            audit=AuditLog(client, AuditFiles(data.audit, limits.max_audit_bytes)),
            samples=SampleStore(client),
        )

    def forgets_at_restart(self) -> bool:
        """Return whether the broker keeps nothing on disk, so that its restart loses every job: it has neither
        an append-only file nor snapshots. ``False`` if it does not tell.
        """
        return not self.client.call("INFO", "persistence")["aof_enabled"] and self._is_set("save", "")

    def survives_power_loss(self) -> bool:
        """Return whether answered writes outlive a loss of power at the broker: it syncs its append-only file before
        each answer. Under ``everysec`` up to about a second of answers is lost; ``WAITAOF`` does not help, since many
        releases answer it before the sync. ``False`` also if the broker does not tell.
        """
        return bool(self.client.call("INFO", "persistence")["aof_enabled"]) and self._is_set("appendfsync", "always")

    def _is_set(self, name: str, value: str) -> bool:
        """Return whether the broker says that a setting of its own has a value."""
        try:
            return value in self.client.call("CONFIG", "GET", name)
        except (redis.ResponseError, BrokerRefused):
            return False

    def close(self) -> None:
        self.client.close()


__all__ = [
    "ApiKeys",
    "ArtifactStore",
    "Attempts",
    "AuditFilter",
    "AuditLog",
    "BrokerCannotWrite",
    "BrokerRefused",
    "BrokerTimeouts",
    "Credential",
    "FileWriter",
    "Files",
    "HostReport",
    "JobFilter",
    "KnownJob",
    "PendingLaunch",
    "SignInFlow",
    "Store",
    "StoreLimits",
    "StoreUnavailable",
    "Submission",
    "TooLarge",
    "UploadedBy",
    "in_loop",
    "parse_ref",
]
