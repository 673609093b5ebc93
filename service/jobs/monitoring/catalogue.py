"""Lists every metric of ``/metrics``, for the scripts that count, the exposition, the alerts and the documentation.

The values of each label are bounded: users choose none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from service.jobs.spec.common import STATES, TERMINAL

_Kind = Literal["gauge", "counter", "histogram"]

POOLS = ("cuda", "cpu")
DEVICES = ("auto", *POOLS)
CAUSES = (
    "DiskFull", "Incomplete", "Interrupted", "KeeperEnded", "LaunchFailed", "LeaseLost", "NoResult", "NotClaimed",
    "Preempted", "RankDied", "Stalled", "SupervisorFault", "SupervisorTerminated", "TimeoutExceeded", "UnknownSpec",
)  # fmt: skip
"""Types of error that the service itself gives to an attempt; an exception of a rank counts as ``Other``."""

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_REQUEST_S = (0.005, 0.025, 0.1, 0.5, 2.0, 10.0)
_START_S = (0.05, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 120.0)
_WAIT_S = (0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 21600.0, 86400.0)


@dataclass(frozen=True)
class MetricDeclaration:
    """One metric. A histogram has ``buckets``: the upper bounds, in its unit, ascending."""

    name: str
    kind: _Kind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: tuple[str, ...] = ()
    """The values of its only label, if known ahead: they are exported from the start, at 0."""

    @cached_property
    def bounds(self) -> tuple[str, ...]:
        """Return the upper bounds as the label ``le`` spells them, the unbounded bucket last."""
        return (*(repr(float(bound)) for bound in self.buckets), "+Inf")


GAUGES = (
    MetricDeclaration("trivet_jobs", "gauge", "Jobs by state", ("state",), values=STATES),
    MetricDeclaration("trivet_active_jobs", "gauge", "Jobs that have not ended, by kind and state", ("kind", "state")),
    MetricDeclaration("trivet_hosts", "gauge", "Worker hosts by state", ("state",)),
    MetricDeclaration("trivet_devices", "gauge", "Devices of live hosts by pool", ("pool",), values=POOLS),
    MetricDeclaration("trivet_devices_free", "gauge", "Devices that wait for work, by pool", ("pool",), values=POOLS),
    MetricDeclaration(
        "trivet_host_devices",
        "gauge",
        "Devices by host, pool and state: free, held, or lost (held by an attempt that was given up)",
        ("host", "pool", "state"),
    ),
    MetricDeclaration("trivet_host_heartbeat_age_seconds", "gauge", "Time since a host last reported", ("host",)),
    MetricDeclaration(
        "trivet_host_clock_skew_seconds", "gauge", "A host's clock less the broker's at its heartbeat", ("host",)
    ),
    MetricDeclaration("trivet_host_failing", "gauge", "1 while parts placed on a host do not start", ("host",)),
    MetricDeclaration("trivet_queue_wait_seconds", "gauge", "Longest present wait for devices"),
    MetricDeclaration(
        "trivet_pending_jobs",
        "gauge",
        "Jobs that wait for devices, by the device asked for",
        ("device",),
        values=DEVICES,
    ),
    MetricDeclaration(
        "trivet_pending_oldest_seconds",
        "gauge",
        "Longest present wait by the device asked for",
        ("device",),
        values=DEVICES,
    ),
    MetricDeclaration("trivet_outbox_parts", "gauge", "Parts that are dispatched or due, and not yet claimed"),
    MetricDeclaration("trivet_outbox_oldest_seconds", "gauge", "Time since the oldest of these parts was placed"),
    MetricDeclaration("trivet_leases", "gauge", "Parts that hold devices"),
    MetricDeclaration("trivet_broker_round_trip_seconds", "gauge", "Time to write to the broker and read it back"),
    MetricDeclaration("trivet_broker_memory_bytes", "gauge", "Memory that the broker uses"),
    MetricDeclaration(
        "trivet_broker_memory_limit_bytes", "gauge", "Memory that the broker may use: its maxmemory, else the machine's"
    ),
    MetricDeclaration("trivet_broker_append_only", "gauge", "1 while the broker keeps an append-only file"),
    MetricDeclaration("trivet_broker_append_only_ok", "gauge", "0 after a write of that file failed"),
    MetricDeclaration("trivet_broker_rewrite_ok", "gauge", "0 after a rewrite of that file or a snapshot failed"),
    MetricDeclaration(
        "trivet_broker_fork_seconds", "gauge", "Duration of the broker's latest fork, during which it stands still"
    ),
    MetricDeclaration("trivet_broker_clients", "gauge", "Connections to the broker"),
    MetricDeclaration("trivet_data_free_bytes", "gauge", "Free space of the file system with the data folder"),
    MetricDeclaration("trivet_data_size_bytes", "gauge", "Size of that file system"),
    MetricDeclaration("trivet_keys_expiring", "gauge", "API keys that expire within a week and have no successor yet"),
    MetricDeclaration("trivet_event_streams", "gauge", "Open event streams of this process"),
)

COUNTS = (
    MetricDeclaration("trivet_jobs_submitted_total", "counter", "Accepted jobs by kind", ("kind",)),
    MetricDeclaration("trivet_jobs_ended_total", "counter", "Ended jobs by kind and state", ("kind", "state")),
    MetricDeclaration(
        "trivet_attempts_ended_total", "counter", "Ended attempts by outcome and cause", ("outcome", "cause")
    ),
    MetricDeclaration("trivet_attempts_placed_total", "counter", "Attempts that got devices"),
    MetricDeclaration("trivet_attempts_started_total", "counter", "Attempts with all parts claimed"),
    MetricDeclaration("trivet_lease_expiries_total", "counter", "Leases that ran out"),
    MetricDeclaration("trivet_failed_starts_total", "counter", "Parts that did not start"),
    MetricDeclaration("trivet_dispatches_total", "counter", "Messages that ask hosts to start a part"),
    MetricDeclaration("trivet_dispatch_retries_total", "counter", "Repeats of such messages"),
    MetricDeclaration("trivet_events_total", "counter", "Events of jobs that the broker accepted"),
    MetricDeclaration("trivet_sign_ins_refused_total", "counter", "Refused sign-ins"),
    MetricDeclaration(
        "trivet_broker_failures_total", "counter", "Requests that failed because the broker was out of reach"
    ),
    MetricDeclaration("trivet_queue_time_seconds", "histogram", "Time from queueing to placement", buckets=_WAIT_S),
    MetricDeclaration(
        "trivet_start_seconds", "histogram", "Time from placement until all parts are claimed", buckets=_START_S
    ),
    MetricDeclaration(
        "trivet_placement_seconds", "histogram", "Duration of a placement, as its agent sees it", buckets=_FAST_S
    ),
    MetricDeclaration(
        "trivet_request_seconds",
        "histogram",
        "Time until a response begins, by method, route and status",
        ("method", "route", "status"),
        _REQUEST_S,
    ),
    MetricDeclaration(
        "trivet_event_loop_lag_seconds",
        "histogram",
        "Delay of a timer in an API process, measured twice a second",
        buckets=_FAST_S,
    ),
)

METRICS = (*GAUGES, *COUNTS)
OPEN_STATES = tuple(state for state in STATES if state not in TERMINAL)
