"""Defines the orders that a supervisor gets from its worker, and its tuning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from service.jobs.records import AttemptRef
from service.jobs.settings import Settings
from service.jobs.store import StoreLimits
from service.jobs.text import LogFormat
from workers.supervisor.job_policy import JobPolicy


@dataclass(frozen=True)
class SupervisorSettings:
    """Times are in seconds. The operator's choices come with the worker's order."""

    claim_within_s: float = 30.0
    """How long to ask an unreachable broker for the claim; then the part is placed again."""
    report_within_s: float = 600.0
    """How long to retry reporting events, artifacts and the outcome; far longer than any lease."""

    upload_batch: int = 256
    """The most events in one call."""
    upload_batch_bytes: int = 1 << 20
    """Bytes of events after which a call takes no more of them."""
    upload_interval_s: float = 0.1
    """Pause after a batch that left less than another one waiting."""
    upload_full: int = 4096
    """Number of waiting events from which further ones stay on disk."""
    upload_full_bytes: int = 16 << 20
    """Bytes of waiting events from which further ones stay on disk."""
    upload_capacity: int = 50_000
    """Number of the supervisor's own waiting events beyond which less important ones are only recorded, not sent."""
    read_interval_s: float = 0.1
    """Pause between two looks into the ranks' event files."""
    write_interval_s: float = 0.25
    """The pause between two writes of the ranks' output, and of the supervisor's own record."""
    store_interval_s: float = 2.0
    """Pause between two searches for files that go to the object store."""
    copied_bytes: int = 4 << 20
    """Size up to which a published file is copied; larger ones get another name."""

    greeting_within_s: float = 10.0
    """The time in which a connection must say which rank speaks."""
    last_words_within_s: float = 1.0
    """The time in which the last words of an ended rank may still be in its socket."""
    drain_within_s: float = 5.0
    """How long to read what ended ranks left in their sockets."""
    socket_pause_s: float = 0.01
    """Pause between two looks for last words, or for room on a disk that hangs."""
    most_unwritten_bytes: int = 16 << 20
    """The most bytes of a rank's output that wait for a slow disk."""

    torchrun_ends_s: float = 3.0
    """Seconds for torchrun to see a failed rank, end the others with SIGTERM and report their exit codes."""
    torchrun_reports_s: float = 10.0
    """Seconds for it to report after all ranks were killed."""
    others_within_s: float = 10.0
    """Seconds, besides a lease, for the other hosts of a gang to report a failure that may have come before the
    one seen here.
    """

    kill_settles_s: float = 1.0
    """Seconds in which whoever killed a rank may kill this process too, as part of all that runs here."""

    first_rank_within_s: float = 600.0
    """Seconds for the first rank to report, before ``stall_s`` counts."""
    stacks_within_s: float = 1.0
    """Seconds for hanging ranks to write their stacks, and at most for each of their forks."""
    stall_interval_s: float = 1.0
    """Longest pause between two checks for hanging ranks."""


@dataclass(frozen=True)
class SupervisorOrder:
    """Supervise this part. The broker's URL may hold a password: it travels in a pipe, never in arguments."""

    job_id: str
    attempt: int
    host: str
    address: str
    """The address at which the other hosts of a gang reach this one."""
    broker_url: str
    data: str
    stop_grace_s: float
    """Seconds between asking the ranks to stop and killing them."""
    limits: StoreLimits
    """The worker's: all processes of a fleet must agree on them."""
    policy: JobPolicy = field(default_factory=JobPolicy)
    log_format: LogFormat = "text"
    devices: dict[str, int] = field(default_factory=dict)
    """The host's devices by pool, among which its cores are divided; of a pool that is left out, those of the part."""

    @classmethod
    def of(
        cls, ref: AttemptRef, address: str, settings: Settings, policy: JobPolicy, devices: Mapping[str, int]
    ) -> SupervisorOrder:
        """Order a part as the settings of its host's worker say."""
        return cls(
            ref.job_id,
            ref.attempt,
            ref.host,
            address,
            settings.broker_url,
            str(settings.layout.root),
            settings.stop_grace_s,
            settings.store_limits,
            policy,
            settings.log_format,
            dict(devices),
        )

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(self.job_id, self.attempt, self.host)

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: str) -> SupervisorOrder:
        fields = json.loads(line)
        limits, policy = StoreLimits(**fields["limits"]), JobPolicy.from_json(fields["policy"])
        return cls(**{**fields, "limits": limits, "policy": policy})
