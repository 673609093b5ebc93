"""Lists the alerts of a service.

Prometheus' rules, ``GET /v1/alerts``, ``trivet alerts`` and the dashboard's page of alerts all use this list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from service.jobs.monitoring.conditions import (
    Both,
    Compared,
    Condition,
    History,
    Increase,
    Labels,
    Latest,
    Magnitude,
    Ratio,
    ServiceUnreachable,
    Total,
)
from service.jobs.records import FrozenModel

Severity = Literal["critical", "warning"]
AlertState = Literal["ok", "pending", "firing"]

_HOSTS_FAULTS = "SupervisorFault|KeeperEnded|LaunchFailed"


@dataclass(frozen=True)
class Alert:
    """Fires once its condition has held for ``for_s`` seconds."""

    name: str
    severity: Severity
    condition: Condition
    for_s: int
    meaning: str
    action: str


@dataclass(frozen=True)
class AlertStatus:
    """The state of an alert for one set of labels; ``since`` is when its condition began to hold, in Unix seconds."""

    alert: Alert
    state: AlertState
    labels: Labels = ()
    value: float | None = None
    since: float | None = None


ALERTS: tuple[Alert, ...] = (
    Alert(
        "TrivetUnreachable", "critical", ServiceUnreachable(), 60,
        "No scrape is answered: the API is down, or its broker.",
        "Look at /healthz: if it answers, the API runs and the broker does not; see /readyz and the broker's log.",
    ),
    Alert(
        "TrivetBrokerFailures", "critical", Compared(Increase("trivet_broker_failures_total", 300), ">", 0), 0,
        "Requests failed in the last five minutes because the broker was out of reach.",
        "See the broker's log and memory. Jobs go on, and leases stand still until it is back.",
    ),
    Alert(
        "TrivetBrokerSlow", "warning", Compared(Latest("trivet_broker_round_trip_seconds"), ">", 0.1), 300,
        "A write to the broker takes more than 0.1 s.",
        "Check its processor, and its disk: under appendfsync always, each write waits for it.",
    ),
    Alert(
        "TrivetBrokerMemory", "critical",
        Compared(Ratio(Latest("trivet_broker_memory_bytes"), Latest("trivet_broker_memory_limit_bytes")), ">", 0.8),
        300,
        "The broker uses more than 80 % of its memory; at its limit it refuses every write.",
        "Set TRIVET_KEEP_JOBS_DAYS or delete old jobs, or give it more memory.",
    ),
    Alert(
        "TrivetBrokerNotDurable", "critical", Compared(Latest("trivet_broker_append_only"), "<", 1), 0,
        "The broker keeps no append-only file: all jobs are lost when it ends.",
        "Set appendonly yes there, and make it permanent with CONFIG REWRITE.",
    ),
    Alert(
        "TrivetBrokerWriteFailed", "critical", Compared(Latest("trivet_broker_append_only_ok"), "<", 1), 0,
        "The broker could not write its append-only file, and accepts nothing until it can.",
        "Make room on its disk, or repair it; the broker continues by itself.",
    ),
    Alert(
        "TrivetBrokerRewriteFailed", "warning", Compared(Latest("trivet_broker_rewrite_ok"), "<", 1), 0,
        "The broker could not rewrite its append-only file, which grows without end.",
        "Its log says why: often a fork for want of memory (vm.overcommit_memory=1), or a full disk.",
    ),
    Alert(
        "TrivetBrokerForkSlow", "warning", Compared(Latest("trivet_broker_fork_seconds"), ">", 1), 0,
        "The broker stood still for more than a second while it forked.",
        "Turn off transparent huge pages on its machine, and keep fewer old jobs.",
    ),
    Alert(
        "TrivetNoHosts", "critical",
        Compared(Total(Latest("trivet_hosts", (("state", "alive|draining|failing"),))), "<", 1), 120,
        "No worker host reports, so no job starts.",
        "Start a worker with trivet worker, or read the log of one that should run.",
    ),
    Alert(
        "TrivetHostsTakeNoJobs", "warning",
        Both(
            Compared(Latest("trivet_queue_wait_seconds"), ">", 60),
            Compared(Total(Latest("trivet_hosts", (("state", "alive"),))), "<", 1),
        ), 60,
        "Jobs wait, and no host takes any: all are drained, failing or lost.",
        "trivet hosts says which; trivet hosts resume NAME lets one take jobs again.",
    ),
    Alert(
        "TrivetHostLost", "critical", Compared(Latest("trivet_host_heartbeat_age_seconds"), ">", 120), 0,
        "A host has been silent for two minutes; its jobs are queued again once their leases end.",
        "Check that it runs and reaches the broker. It is forgotten after a day.",
    ),
    Alert(
        "TrivetHostFailing", "critical", Compared(Latest("trivet_host_failing"), ">", 0), 0,
        "Jobs placed on a host do not start there, so it gets one at a time, after growing pauses.",
        "trivet hosts says why; fix that, then run trivet hosts resume NAME.",
    ),
    Alert(
        "TrivetStartsFail", "warning", Compared(Increase("trivet_failed_starts_total", 900), ">", 4), 0,
        "More than four parts of jobs did not start in a quarter of an hour.",
        "trivet hosts shows failing hosts; see the agents' logs and supervisors.log on them.",
    ),
    Alert(
        "TrivetHostFaults", "warning",
        Compared(Increase("trivet_attempts_ended_total", 900, (("cause", _HOSTS_FAULTS),)), ">", 2), 0,
        "Attempts ended by a fault of the service's own processes on a host.",
        "Read the errors in trivet jobs --state failed, then the host's log.",
    ),
    Alert(
        "TrivetDevicesLost", "warning",
        Compared(Total(Latest("trivet_host_devices", (("state", "lost"),))), ">", 0), 600,
        "Attempts that were given up still hold devices: their host does not confirm that the processes are gone.",
        "Check that the host runs; end the processes there, or the host.",
    ),
    Alert(
        "TrivetClockSkew", "warning", Compared(Magnitude(Latest("trivet_host_clock_skew_seconds")), ">", 5), 60,
        "The clocks of a host and of the broker differ by more than 5 s: times of events are wrong, leases are not.",
        "Check that time is synchronised (NTP) on both.",
    ),
    Alert(
        "TrivetDispatchStuck", "critical", Compared(Latest("trivet_outbox_oldest_seconds"), ">", 30), 60,
        "A part was placed on a host, and nobody claims it.",
        "Read that agent's log, and check that its queue in the broker is read.",
    ),
    Alert(
        "TrivetDispatchRetries", "warning", Compared(Increase("trivet_dispatch_retries_total", 600), ">", 20), 0,
        "Messages that start jobs are sent again and again.",
        "Read the agents' logs: hosts start supervisors slowly, or do not read their queue.",
    ),
    Alert(
        "TrivetLeasesExpire", "critical", Compared(Increase("trivet_lease_expiries_total", 600), ">", 2), 0,
        "More than two leases ran out in ten minutes: supervisors died, or cannot reach the broker.",
        "Look for hosts without memory or network; the events of the jobs name them.",
    ),
    Alert(
        "TrivetWaitsBesideFreeDevices", "warning",
        Both(
            Compared(Latest("trivet_queue_wait_seconds"), ">", 1800),
            Compared(Total(Latest("trivet_devices_free")), ">", 0),
        ), 300,
        "A job has waited for half an hour although devices are free.",
        "trivet show JOB says why: it may need more devices on one host than are free, or another pool.",
    ),
    Alert(
        "TrivetQueueLong", "warning", Compared(Latest("trivet_queue_wait_seconds"), ">", 21_600), 0,
        "A job has waited for six hours.",
        "Add hosts, or look for jobs that hold devices without progress.",
    ),
    Alert(
        "TrivetStartsSlow", "warning",
        Compared(
            Ratio(Increase("trivet_start_seconds_sum", 1800), Increase("trivet_start_seconds_count", 1800)), ">", 15
        ), 0,
        "In the last half hour, jobs took more than 15 s on average from placement to start.",
        "Check the load of the hosts, and TRIVET_WARM_SUPERVISORS.",
    ),
    Alert(
        "TrivetPlacementSlow", "warning",
        Compared(
            Ratio(Increase("trivet_placement_seconds_sum", 600), Increase("trivet_placement_seconds_count", 600)),
            ">", 0.1,
        ), 0,
        "A placement takes more than 0.1 s on average.",
        "Check the broker's processor; every other call waits meanwhile.",
    ),
    Alert(
        "TrivetApiErrors", "critical",
        Compared(
            Ratio(
                Increase("trivet_request_seconds_count", 300, (("status", "500|503"),)),
                Increase("trivet_request_seconds_count", 300),
            ),
            ">", 0.05,
        ), 60,
        "More than 5 % of requests fail by the service's fault.",
        "The API's log has each of them, with its request id.",
    ),
    Alert(
        "TrivetEventLoopLag", "warning",
        Compared(
            Ratio(
                Increase("trivet_event_loop_lag_seconds_sum", 300), Increase("trivet_event_loop_lag_seconds_count", 300)
            ),
            ">",
            0.1,
        ), 60,
        "Timers of the API are late by more than 0.1 s on average: streams and answers stall.",
        "Give the API more processor time, or start more API processes.",
    ),
    Alert(
        "TrivetDiskNearlyFull", "warning",
        Compared(Ratio(Latest("trivet_data_free_bytes"), Latest("trivet_data_size_bytes")), "<", 0.1), 60,
        "Less than 10 % of the data folder's disk is free.",
        "Set TRIVET_KEEP_JOBS_DAYS, lower TRIVET_MAX_CACHE_BYTES, or delete jobs.",
    ),
    Alert(
        "TrivetDiskFull", "critical",
        Compared(Ratio(Latest("trivet_data_free_bytes"), Latest("trivet_data_size_bytes")), "<", 0.02), 0,
        "Less than 2 % of the data folder's disk is free: jobs are about to fail with DiskFull.",
        "Make room at once.",
    ),
    Alert(
        "TrivetAttemptsWithoutDisk", "critical",
        Compared(Increase("trivet_attempts_ended_total", 900, (("cause", "DiskFull"),)), ">", 0), 0,
        "An attempt ended because a disk was full.",
        "Its error names the disk; make room there.",
    ),
    Alert(
        "TrivetKeysExpire", "warning", Compared(Latest("trivet_keys_expiring"), ">", 0), 0,
        "An API key expires within a week, and nothing has taken its place.",
        "trivet keys list says which; trivet keys rotate ID makes its successor.",
    ),
    Alert(
        "TrivetSignInsRefused", "warning", Compared(Increase("trivet_sign_ins_refused_total", 600), ">", 50), 0,
        "More than 50 sign-ins were refused in ten minutes: somebody may be trying keys.",
        "The proxy's log has the addresses; after a few tries, each is refused for a while.",
    ),
)  # fmt: skip

WATCHED = frozenset().union(*(alert.condition.metrics for alert in ALERTS))
"""The series that alerts read, which the service must store."""
REMEMBERED_S = 2700
"""The longest window and the longest wait together, with some room."""


def evaluate(history: History, alerts: Iterable[Alert] = ALERTS) -> list[AlertStatus]:
    """Return the state of each alert at the last moment of the history, firing ones first."""
    found = [status for alert in alerts for status in _statuses(alert, history)]
    return sorted(found, key=lambda each: ("firing", "pending", "ok").index(each.state))


def _statuses(alert: Alert, history: History) -> list[AlertStatus]:
    held = alert.condition.of(history) if history else {}
    statuses = []
    for labels, value in held.items():
        since = _since(alert.condition, history, labels)
        fires = history[-1].at - since >= alert.for_s
        statuses.append(AlertStatus(alert, "firing" if fires else "pending", labels, value, since))
    return statuses or [AlertStatus(alert, "ok")]


def _since(condition: Condition, history: History, labels: Labels) -> float:
    """Return the first moment since which the condition has held for these labels."""
    first = len(history)
    while first > 1 and labels in condition.of(history[: first - 1]):
        first -= 1
    return history[first - 1].at


class ShownAlert(FrozenModel):
    """One alert, for one set of labels."""

    name: str
    severity: Severity
    state: AlertState
    """``pending`` while the condition holds but has not held long enough to fire."""
    labels: dict[str, str]
    """Its subject, such as ``host``; empty for the whole service."""
    value: float | None = None
    since: datetime | None = None
    meaning: str
    action: str
    """What to do about it."""
    expression: str
    """Return a condition as a query for Prometheus."""

    @classmethod
    def of(cls, status: AlertStatus) -> ShownAlert:
        """Return an alert's state and message."""
        alert = status.alert
        return cls(
            name=alert.name,
            severity=alert.severity,
            state=status.state,
            labels=dict(status.labels),
            value=status.value,
            since=None if status.since is None else datetime.fromtimestamp(status.since, UTC),
            meaning=alert.meaning,
            action=alert.action,
            expression=alert.condition.promql,
        )
