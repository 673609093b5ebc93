"""Limits the store's data and times, in seconds unless stated otherwise.

A limit that an operator may choose is a field of :class:`service.jobs.settings.Settings` too, by the same name, with
its default from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TypeVar

import orjson

from service.jobs.spec.common import LOCAL, ExportTargets

_IN_SCRIPTS = "in scripts"
T = TypeVar("T")


def _for_scripts(default: T) -> T:
    """Declare a limit that the scripts read too, by this name; one in seconds by the name of its milliseconds."""
    return field(default=default, metadata={_IN_SCRIPTS: True})


@dataclass(frozen=True)
class StoreLimits:
    """Limits the store's scripts. All times are compared on the store's own clock (``store/lua/lib/core.lua``)."""

    lease_s: float = _for_scripts(15.0)
    """A claimed part that is not renewed for this long is lost."""
    starting_lease_s: float = _for_scripts(60.0)
    """A placed part that stays unclaimed for this long is taken back."""
    heartbeat_s: float = _for_scripts(10.0)
    """A host that is silent for this long gets no work."""
    redispatch_s: float = _for_scripts(5.0)
    """An unclaimed part is dispatched again after this long."""
    stream_cap: int = _for_scripts(50_000)
    """Events kept in a job's stream (about)."""
    stream_bytes: int = _for_scripts(32 << 20)
    """Bytes of events kept in a job's stream."""
    project_stream_bytes: int = _for_scripts(512 << 20)
    """Bytes of events kept in the streams of a project's jobs together; beyond, a job that reports keeps fewer."""
    least_stream_bytes: int = _for_scripts(1 << 20)
    """Bytes of events that a job's stream may have however many its project's other jobs have."""
    idem_ttl_s: float = _for_scripts(86_400.0)
    """An idempotency key is remembered for this long."""
    max_queue_bypass_s: float = _for_scripts(600.0)
    """A job that has waited for longer is never overtaken by backfill."""
    fair_share_half_life_s: float = _for_scripts(86_400.0)
    """A project's past use counts half as much after this long, when its share is compared with others'."""
    fair_share_bound_s: float | None = None
    """A job that has waited for longer goes before those of equal priority that were queued later, whatever their
    projects' shares; ``max_queue_bypass_s`` when absent."""
    quota_window_h: int = _for_scripts(168)
    """Hours that quotas of device-hours count, the current one included."""
    default_quotas: str = ""
    """Quotas that a project has when it is created, as :func:`service.jobs.accounts.parse_quotas` reads them."""
    preemption_min_run_s: float = 300.0
    """A preemptible job has run for this long before it may be asked to make room."""
    made_room_s: float = _for_scripts(120.0)
    """While jobs make room for another one, nothing behind that takes their devices, for this long at most."""
    max_lost_attempts: int = _for_scripts(5)
    """Attempts of a job that may end by no fault of its own (the supervisor, host or broker was lost, nobody claimed
    it) without using a retry; one more fails it."""
    forget_host_s: float = _for_scripts(86_400.0)
    """A host that is silent for this long is forgotten, with the devices it still held."""
    max_file_bytes: int = 1 << 30
    """The largest uploaded file."""
    max_job_artifacts: int = _for_scripts(10_000)
    """Artifacts of one job; more are not taken."""
    max_job_artifact_bytes: int = _for_scripts(1 << 40)
    """Bytes of all artifacts of one job."""
    keep_uploads_days: float | None = 30.0
    """An upload expires after so many days without use; ``None`` keeps all."""
    list_page_bytes: int = 2**21
    """Bytes of records after which a page of jobs takes no more of them."""
    list_scan: int = 100
    """Jobs that one script looks at: meanwhile the broker does nothing else, for two or three milliseconds."""
    list_most: int = 20_000
    """A page ends after so many jobs were looked at, even when few matched; its cursor goes on from there."""
    session_idle_s: float = 3600.0
    """A session of the dashboard that is not used for this long is over."""
    session_s: float = 43_200.0
    """A session is over after this long, however much it is used."""

    objects: str | None = None
    """URL of the object store for files; without one, all hosts share a folder."""
    launcher: str = LOCAL
    """The launcher of jobs that name none."""
    max_key_days: float | None = None
    """Longest life of an API key; the first admin key is exempt."""
    max_audit_bytes: int = 1 << 30
    """Bytes of files of the audit log; beyond them the oldest are deleted."""

    export_mlflow: str | None = None
    export_tensorboard: bool | None = None
    export_otlp: str | None = None
    export_wandb: str | None = None
    """Export targets of jobs whose specs name none, see :attr:`exports`."""

    @cached_property
    def exports(self) -> ExportTargets:
        """Return the export targets of jobs whose specs name none."""
        given = {name: getattr(self, f"export_{name}") for name in ExportTargets.model_fields}
        return ExportTargets.model_validate(given)

    @property
    def longest_overtaken_s(self) -> float:
        """Return after how long a job of equal priority is no longer overtaken by fair share."""
        return self.max_queue_bypass_s if self.fair_share_bound_s is None else self.fair_share_bound_s

    @cached_property
    def script_argument(self) -> str:
        """Return the limits as the scripts read them: JSON, times in integer milliseconds."""
        limits = {each.name: getattr(self, each.name) for each in fields(self) if each.metadata.get(_IN_SCRIPTS)}
        limits["fair_share_bound_s"] = self.longest_overtaken_s
        times = {f"{name[:-2]}_ms": max(1, round(s * 1000)) for name, s in limits.items() if name.endswith("_s")}
        return orjson.dumps(times | {name: most for name, most in limits.items() if not name.endswith("_s")}).decode()
