"""Defines the orders that a supervisor gets from its worker: one line of JSON on standard input."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from service.jobs.logs import LogFormat
from service.jobs.records import AttemptRef
from service.jobs.store import StoreLimits
from workers.supervisor.job_policy import JobPolicy


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
