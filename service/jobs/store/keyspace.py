"""Names every key that Trivet keeps in Redis, for Python and for the Lua scripts.

The scripts compute the keys of dependents, hosts and indexes from the data that they read, so their keys cannot
be declared ahead: Trivet needs one primary (with replicas), not a cluster that splits keys over nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

PREFIX = "trivet:"

_Lifetime = Literal["permanent", "expires"]
"""``permanent`` keys are deleted with the object that they describe; ``expires`` keys always carry a TTL."""


@dataclass(frozen=True)
class Key:
    """A family of keys; calling it with the parts of the name gives one key."""

    name: str
    template: str
    holds: str
    lifetime: _Lifetime = "permanent"

    def __call__(self, *parts: str) -> str:
        return PREFIX + self.template.format(*parts)

    @property
    def pattern(self) -> re.Pattern[str]:
        """Return the form of this family's keys."""
        return re.compile(re.escape(PREFIX) + re.escape(self.template).replace(r"\{\}", "(.+)"), re.DOTALL)

    @property
    def glob(self) -> str:
        """Return the pattern by which a broker's access rules name the keys of this family."""
        return PREFIX + self.template.replace("{}", "*")

    @property
    def lua(self) -> str:
        """Return the same function in Lua, as a field of the table ``KEY``."""
        literals = [f'"{piece}"' for piece in (PREFIX + self.template).split("{}")]
        names = [f"part{index}" for index in range(len(literals) - 1)]
        pieces = [piece for pair in zip(literals, [*names, ""], strict=True) for piece in pair if piece]
        return f"function KEY.{self.name}({', '.join(names)}) return {' .. '.join(pieces)} end"


JOB = Key("job", "job:{}", "HASH: the record of a job")
JOB_EVENTS = Key("job_events", "job:{}:events", "STREAM: t=type, d=JSON, capped")
JOB_ARTIFACTS = Key("job_artifacts", "job:{}:artifacts", "HASH: name → JSON")
JOB_PARTS = Key("job_parts", "job:{}:parts", "HASH: host → status of its part of the current attempt")
JOB_BATCHES = Key("job_batches", "job:{}:batches", "HASH: host → number of its newest batch of events since its claim")
JOB_WAITS = Key("job_waits", "job:{}:waits", "SET: jobs that must succeed before this one is pending")
JOB_DEPENDENTS = Key(
    "job_dependents", "job:{}:dependents", "ZSET: unfinished jobs that need this one; score 1 while they wait for it"
)
JOBS = Key("jobs", "jobs", "ZSET: every job id, all scores 0 (ids sort by age)")
JOBS_BY = Key("jobs_by", "jobs:by:{}", "ZSET: the same for one kind, state, owner, label or project")
ARTIFACT_BYTES = Key("artifact_bytes", "artifact_bytes", "HASH: project → bytes of the artifacts of its jobs")
EVENT_BYTES = Key("event_bytes", "event_bytes", "HASH: project → bytes of the events in the streams of its jobs")
PROJECT_ARTIFACTS = Key("project_artifacts", "project:{}:artifacts", "ZSET: job → bytes of its artifacts")
SWEEP = Key("sweep", "sweep:{}", "HASH: how many jobs of a sweep there are in all and in each state, and the best one")
SWEEP_VALUES = Key(
    "sweep_values",
    "sweep:{}:values",
    "HASH: job:step → number in the order of arrival, and the value, for a sweep's rule",
)
SWEEPS_TO_JUDGE = Key("sweeps_to_judge", "sweeps:to_judge", "SET: sweeps with values that their rule has not judged")
ENDED = Key("ended", "ended", "LIST: job:state of ended jobs some of whose dependents were not told yet")
CLOCK = Key("clock", "clock", "HASH: the store's own time and the time of day, in ms, when it was last noted")
SEQUENCE = Key("sequence", "sequence", "STRING: time part of the newest job id")
PENDING = Key("pending", "pending", "ZSET: jobs that wait for devices, score = -priority·1e13 + queueing time in ms")
PENDING_SLICE = Key("pending_slice", "pending:slice:{}:{}", "ZSET: the same for one shape and priority")
PENDING_NODE = Key(
    "pending_node", "pending:node:{}:{}:{}:{}", "ZSET: first jobs of the slices in a square of the index"
)
PENDING_GROUPS = Key("pending_groups", "pending:groups", "HASH: group of shapes → how many pending jobs are in it")
LAUNCHING = Key("launching", "launching:{}", "ZSET: pending jobs that a launcher gets devices for, as in pending")
LAUNCHER_HOLDER = Key(
    "launcher_holder", "launcher:{}:holder", "STRING: the worker that asks a launcher for devices", "expires"
)
USES = Key("uses", "uses", "HASH: project → decayed device-ms, devices held, when that was so in ms")
WEIGHTS = Key("weights", "weights", "HASH: project → its weight, where that is not 1")
DEVICE_HOURS = Key("device_hours", "device_hours:{}", "HASH: hour of the store's clock → device-ms of a project in it")
PLACEMENT_QUOTAS = Key(
    "placement_quotas", "placement:quotas", "HASH: project → JSON of its quotas that placement keeps"
)
CAPACITY = Key("capacity", "capacity", "STRING: JSON of what the hosts hold when idle, and of jobs not to be overtaken")
PREEMPTIBLE = Key("preemptible", "preemptible", "ZSET: running jobs that may be asked to make room; score = priority")
MADE_ROOM = Key("made_room", "made_room:{}", "STRING: job that devices of a pool are being freed for", "expires")
PREEMPTION_PAUSE = Key("preemption_pause", "preemption:pause", "STRING: set while preemption rests", "expires")
PLACEMENT_IDLE = Key(
    "placement_idle",
    "placement:idle",
    "STRING: set while nothing changed since nothing more could be placed",
    "expires",
)
PLACEMENT_NEWS = Key("placement_news", "placement:news", "LIST: an entry while no agent has seen the newest change")
HOSTS = Key("hosts", "hosts", "ZSET: host → end of its heartbeat in ms")
HOST = Key("host", "host:{}", "HASH: what a host last reported")
HOST_FREE = Key("host_free", "host:{}:free:{}", "SET: free device indices of one pool")
HOST_PARTS = Key("host_parts", "host:{}:parts", "HASH: job:attempt → JSON of the devices that it holds here")
LEASES = Key("leases", "leases", "ZSET: job:attempt:host → end of the lease in ms")
OUTBOX = Key("outbox", "outbox", "ZSET: job:attempt:host → when to dispatch it (again) in ms")
IDEMPOTENCY = Key("idempotency", "idem:{}", "STRING: what an idempotency key led to", "expires")
API_KEYS = Key("api_keys", "keys", "HASH: id → JSON with the digest of the secret")
API_KEYS_USED = Key("api_keys_used", "keys:used", "HASH: id → last use in ms")
PROJECTS = Key("projects", "projects", "HASH: name → JSON of a project")
PROJECT_MEMBERS = Key("project_members", "project:{}:members", "HASH: owner of keys → role")
API_KEYS_DISABLED = Key("api_keys_disabled", "keys:disabled", "SET: ids of keys whose service account is disabled")
ACCOUNTS = Key("accounts", "accounts", "HASH: name → JSON of a service account")
PEPPER = Key("pepper", "keys:pepper", "STRING: the secret of this service that digests of keys are made with")
SESSION = Key("session", "session:{}", "HASH: key, digest of the page's secret, latest end in ms", "expires")
SESSION_TICKET = Key("session_ticket", "ticket:{}:{}", "STRING: the path that a session's ticket admits to", "expires")
SIGN_INS = Key("sign_ins", "sign_ins:{}", "STRING: refused sign-ins of an address", "expires")
AUDIT = Key("audit", "audit", "STREAM: the newest entries of the audit log, e=JSON, by number")
AUDIT_HEAD = Key("audit_head", "audit:head", "HASH: number and hash of the newest entry of the audit log")
AUDIT_REFUSALS = Key(
    "audit_refusals", "audit:refusals:{}", "STRING: refused requests of an address, or of all", "expires"
)
SIGN_IN_FLOW = Key(
    "sign_in_flow", "sign_in_flow:{}", "STRING: JSON of a sign-in that waits for the OpenID Connect provider", "expires"
)
COUNTS = Key("counts", "counts", "HASH: metric, and the values of its labels → what all processes counted")
SAMPLES = Key("samples", "samples", "LIST: JSON of the numbers that alerts read, by time, capped")
SAMPLING = Key("sampling", "sampling", "STRING: set while the latest of them is new", "expires")
WEBHOOKS = Key("webhooks", "webhooks", "HASH: id → JSON of a webhook, with its secret")
WEBHOOKS_PRESENT = Key("webhooks_present", "webhook:present", "STRING: set while there are webhooks")
WEBHOOK_CHANGES = Key(
    "webhook_changes", "webhook:changes", "STREAM: d=JSON, changes of jobs' states to make deliveries of, capped"
)
WEBHOOK_DUE = Key("webhook_due", "webhook:due", "ZSET: webhook:delivery → when to send it (again) in ms")
WEBHOOK_DELIVERY = Key("webhook_delivery", "webhook:delivery:{}:{}", "STRING: JSON of a delivery", "expires")
WEBHOOK_DELIVERIES = Key(
    "webhook_deliveries", "webhook:deliveries:{}", "ZSET: a webhook's newest deliveries by when they were made, in ms"
)
WEBHOOK_SECRETS = Key(
    "webhook_secrets",
    "webhook:secrets",
    "HASH: project → the secret that what its jobs' specs ask to tell is signed by",
)
WEBHOOKS_FAILING = Key(
    "webhooks_failing", "webhook:failing", "HASH: webhook → since when all its deliveries fail, in ms"
)
EXPORTS_DUE = Key("exports_due", "exports:due", "ZSET: job:target → when to export an ended job there (again) in ms")
EXPORT_SEAT = Key("export_seat", "exports:seat:{}", "STRING: the process that makes a target's exports", "expires")
READY = Key("ready", "ready:{}", "STRING: a readiness probe's value", "expires")
FILES = Key("files", "files", "HASH: id → JSON of an uploaded file, as before there were projects")
UPLOADS = Key("uploads", "project:{}:uploads", "HASH: file → JSON of what the project uploaded")
UPLOAD_HOLDERS = Key("upload_holders", "upload:{}:projects", "SET: projects that have uploaded the file")
UPLOADS_USED = Key("uploads_used", "uploads:used", "ZSET: project/file → time of day of its last use in ms")

KEYS: tuple[Key, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Key))
