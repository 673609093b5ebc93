"""Each alert fires when what it tells of has lasted long enough, and none does on a healthy service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis as redis_py
import yaml

from service.jobs.files import DataLayout
from service.jobs.monitoring.alerts import ALERTS, REMEMBERED_S, WATCHED, Alert, evaluate
from service.jobs.monitoring.catalogue import METRICS
from service.jobs.monitoring.conditions import Increase, Latest, Moment, ServiceUnreachable
from service.jobs.monitoring.numbers import Numbers, Series
from service.jobs.monitoring.rules import rules
from service.jobs.store import HostReport, Store

RULES = Path(__file__).parents[3] / "docker" / "prometheus" / "trivet.rules.yml"
STEP_S = 30
NOW = 1_000_000.0
HOST = (("host", "a"),)


def one(name: str, *labels: tuple[str, str]) -> Series:
    return Series(name, labels)


def constant(series: Series, value: float) -> Callable[[float], Numbers]:
    """What is so all the time."""
    return lambda age: {series: value}


def growing(series: Series, each_minute: float, **others: float) -> Callable[[float], Numbers]:
    """What is counted more and more, and what beside it."""
    counted = {series: each_minute, **{Series(name): by for name, by in others.items()}}
    return lambda age: {each: by * (10_000 - age / 60) for each, by in counted.items()}


def both(*planted: Callable[[float], Numbers]) -> Callable[[float], Numbers]:
    return lambda age: {series: value for each in planted for series, value in each(age).items()}


CPU_FREE = one("trivet_devices_free", ("pool", "cpu"))
PLANTED: dict[str, Callable[[float], Numbers]] = {
    "TrivetBrokerFailures": growing(one("trivet_broker_failures_total"), 1),
    "TrivetBrokerSlow": constant(one("trivet_broker_round_trip_seconds"), 0.3),
    "TrivetBrokerMemory": both(
        constant(one("trivet_broker_memory_bytes"), 90), constant(one("trivet_broker_memory_limit_bytes"), 100)
    ),
    "TrivetBrokerNotDurable": constant(one("trivet_broker_append_only"), 0),
    "TrivetBrokerWriteFailed": constant(one("trivet_broker_append_only_ok"), 0),
    "TrivetBrokerRewriteFailed": constant(one("trivet_broker_rewrite_ok"), 0),
    "TrivetBrokerForkSlow": constant(one("trivet_broker_fork_seconds"), 2),
    "TrivetNoHosts": constant(one("trivet_hosts", ("state", "alive")), 0),
    "TrivetHostsTakeNoJobs": both(
        constant(one("trivet_queue_wait_seconds"), 90),
        constant(one("trivet_hosts", ("state", "draining")), 1),
        constant(one("trivet_hosts", ("state", "alive")), 0),
    ),
    "TrivetHostLost": constant(one("trivet_host_heartbeat_age_seconds", *HOST), 300),
    "TrivetHostFailing": constant(one("trivet_host_failing", *HOST), 1),
    "TrivetStartsFail": growing(one("trivet_failed_starts_total"), 1),
    "TrivetHostFaults": growing(one("trivet_attempts_ended_total", ("outcome", "lost"), ("cause", "KeeperEnded")), 1),
    "TrivetDevicesLost": constant(one("trivet_host_devices", *HOST, ("pool", "cpu"), ("state", "lost")), 2),
    "TrivetClockSkew": constant(one("trivet_host_clock_skew_seconds", *HOST), -60),
    "TrivetDispatchStuck": constant(one("trivet_outbox_oldest_seconds"), 90),
    "TrivetDispatchRetries": growing(one("trivet_dispatch_retries_total"), 5),
    "TrivetLeasesExpire": growing(one("trivet_lease_expiries_total"), 1),
    "TrivetWaitsBesideFreeDevices": both(constant(one("trivet_queue_wait_seconds"), 3600), constant(CPU_FREE, 1)),
    "TrivetQueueLong": constant(one("trivet_queue_wait_seconds"), 30_000),
    "TrivetStartsSlow": growing(one("trivet_start_seconds_sum"), 60, trivet_start_seconds_count=2),
    "TrivetPlacementSlow": growing(one("trivet_placement_seconds_sum"), 20, trivet_placement_seconds_count=60),
    "TrivetApiErrors": both(
        growing(one("trivet_request_seconds_count", ("method", "GET"), ("route", "/v1/jobs"), ("status", "500")), 1),
        growing(one("trivet_request_seconds_count", ("method", "GET"), ("route", "/v1/jobs"), ("status", "200")), 9),
    ),
    "TrivetEventLoopLag": growing(
        one("trivet_event_loop_lag_seconds_sum"), 60, trivet_event_loop_lag_seconds_count=120
    ),
    "TrivetDiskNearlyFull": both(
        constant(one("trivet_data_free_bytes"), 5), constant(one("trivet_data_size_bytes"), 100)
    ),
    "TrivetDiskFull": both(constant(one("trivet_data_free_bytes"), 1), constant(one("trivet_data_size_bytes"), 100)),
    "TrivetAttemptsWithoutDisk": growing(
        one("trivet_attempts_ended_total", ("outcome", "failed"), ("cause", "DiskFull")), 1
    ),
    "TrivetKeysExpire": constant(one("trivet_keys_expiring"), 1),
    "TrivetSignInsRefused": growing(one("trivet_sign_ins_refused_total"), 10),
}


@pytest.fixture
def healthy(broker: str, redis: redis_py.Redis, data: DataLayout) -> Numbers:
    """The numbers of a real service with one host, and of a disk with room."""
    store = Store.connect(broker, data)
    store.hosts.beat(HostReport("a", "127.0.0.1", cpu_slots=4))
    numbers = store.gauges.numbers()
    store.close()
    return numbers | {Series("trivet_data_free_bytes"): 50.0, Series("trivet_data_size_bytes"): 100.0}


def history(healthy: Numbers, planted: Callable[[float], Numbers], lasts_s: float) -> list[Moment]:
    """The last three quarters of an hour, with what is planted in the last ``lasts_s`` of them."""
    moments = []
    for age in range(REMEMBERED_S, -1, -STEP_S):
        changed = planted(age if age <= lasts_s else lasts_s)
        is_count = {series for series in changed if series.name.endswith(("_total", "_sum", "_count"))}
        shown = {series: value for series, value in changed.items() if age <= lasts_s or series in is_count}
        moments.append(Moment(NOW - age, healthy | shown))
    return moments


def firing(moments: list[Moment]) -> set[str]:
    return {status.alert.name for status in evaluate(moments) if status.state == "firing"}


def test_a_healthy_service_is_silent(healthy: Numbers) -> None:
    assert firing(history(healthy, lambda age: {}, 0)) == set()
    assert firing([Moment(NOW, healthy)]) == set()
    assert {status.state for status in evaluate(history(healthy, lambda age: {}, 0))} == {"ok"}


@pytest.mark.parametrize("alert", [each for each in ALERTS if each.name in PLANTED], ids=lambda each: each.name)
def test_an_alert_fires_from_its_planted_state(healthy: Numbers, alert: Alert) -> None:
    planted = PLANTED[alert.name]
    assert alert.name in firing(history(healthy, planted, REMEMBERED_S))
    assert alert.name not in firing(history(healthy, lambda age: {}, 0))


@pytest.mark.parametrize(
    "alert", [each for each in ALERTS if each.name in PLANTED and each.for_s > STEP_S], ids=lambda each: each.name
)
def test_an_alert_that_is_to_last_is_pending_before(healthy: Numbers, alert: Alert) -> None:
    moments = history(healthy, PLANTED[alert.name], STEP_S)
    states = {status.alert.name: status.state for status in evaluate(moments)}
    assert states[alert.name] in {"pending", "ok"}, "a mean over minutes may not have risen yet"
    long = history(healthy, PLANTED[alert.name], REMEMBERED_S)
    since = next(status.since for status in evaluate(long) if status.alert == alert and status.state == "firing")
    assert since is not None
    assert since <= NOW - alert.for_s


def test_every_alert_has_a_planted_state() -> None:
    without = {alert.name for alert in ALERTS if alert.name not in PLANTED}
    assert without == {"TrivetUnreachable"}, "which only Prometheus can see"
    assert next(alert for alert in ALERTS if alert.name == "TrivetUnreachable").condition == ServiceUnreachable()


def test_alerts_read_what_is_exported() -> None:
    declared = {metric.name for metric in METRICS}
    for name in WATCHED:
        base = name.removesuffix("_sum").removesuffix("_count")
        assert name in declared or base in declared, name


def test_an_alert_names_what_it_is_about(healthy: Numbers) -> None:
    moments = history(healthy, PLANTED["TrivetHostLost"], REMEMBERED_S)
    status = next(each for each in evaluate(moments) if each.alert.name == "TrivetHostLost")
    assert (dict(status.labels), status.value) == ({"host": "a"}, 300)


def test_a_counter_that_was_begun_anew_does_not_shrink() -> None:
    total = Series("trivet_events_total")
    moments = [Moment(at, {total: value}) for at, value in enumerate((5.0, 7.0, 1.0, 2.0))]
    assert Increase("trivet_events_total", 60).of(moments) == {(): 2 + 1 + 1}
    assert Increase("trivet_events_total", 1).of(moments) == {(): 1}
    assert Latest("trivet_events_total").of([]) == {}


def test_the_rules_of_prometheus_are_those_of_the_list() -> None:
    assert RULES.read_text() == rules(), (
        "run: python -m service.jobs.monitoring.rules > docker/prometheus/trivet.rules.yml"
    )
    listed = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in listed] == [alert.name for alert in ALERTS]
    assert all(rule["annotations"]["action"] for rule in listed)


def test_the_document_lists_the_alerts() -> None:
    document = (RULES.parents[2] / "docs" / "run" / "monitoring.md").read_text()
    rows = [f"| `{each.name}` | {each.severity} | {each.for_s} s | {each.meaning} |" for each in ALERTS]
    assert "\n".join(rows) in document
