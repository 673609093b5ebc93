"""Counts of processes become numbers as Prometheus spells them, whatever is counted and in whatever order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.monitoring.catalogue import COUNTS, METRICS
from service.jobs.monitoring.numbers import Meter, Series, from_counts

PLACEMENT = next(metric for metric in COUNTS if metric.name == "trivet_placement_seconds")


def kept(*meters: Meter) -> dict[str, str]:
    """What the broker keeps of several processes."""
    total: Counter[str] = Counter()
    for meter in meters:
        for field, by in meter.take().items():
            total[field] += by  # type: ignore[assignment]
    return {field: str(value) for field, value in total.items()}


@given(st.lists(st.tuples(st.integers(0, 1), st.floats(0, 2, allow_subnormal=False))))
def test_a_histogram_adds_up_over_processes(seen: list[tuple[int, float]]) -> None:
    meters = Meter(), Meter()
    for process, seconds in seen:
        meters[process].observe(PLACEMENT.name, seconds)
    numbers = from_counts(kept(*meters))
    for bound in PLACEMENT.bounds:
        expected = sum(seconds <= float(bound) for _, seconds in seen)
        assert numbers[Series(f"{PLACEMENT.name}_bucket", (("le", bound),))] == expected
    assert numbers[Series(f"{PLACEMENT.name}_count")] == len(seen)
    assert numbers[Series(f"{PLACEMENT.name}_sum")] == pytest.approx(sum(seconds for _, seconds in seen))


def test_labels_keep_the_order_of_the_declaration() -> None:
    meter = Meter()
    meter.count("trivet_jobs_ended_total", "train", "failed", by=3)
    meter.observe("trivet_request_seconds", 0.3, "GET", "/v1/jobs", "200")
    numbers = from_counts(kept(meter))
    assert numbers[Series("trivet_jobs_ended_total", (("kind", "train"), ("state", "failed")))] == 3
    labels = (("method", "GET"), ("route", "/v1/jobs"), ("status", "200"))
    assert numbers[Series("trivet_request_seconds_bucket", (*labels, ("le", "0.5")))] == 1
    assert numbers[Series("trivet_request_seconds_bucket", (*labels, ("le", "0.1")))] == 0


def test_what_could_not_be_added_is_kept() -> None:
    meter = Meter()
    meter.count("trivet_events_total", by=2)
    taken = meter.take()
    meter.count("trivet_events_total")
    meter.give_back(taken)
    assert from_counts(kept(meter))[Series("trivet_events_total")] == 3
    assert meter.take() == {}


def test_what_another_version_counted_is_left_out() -> None:
    numbers = from_counts({"trivet_gone_total": "3", "trivet_events_total\tlabel": "4", "trivet_events_total": "5"})
    assert numbers[Series("trivet_events_total")] == 5
    assert {series.name for series in numbers if "gone" in series.name} == set()


def test_an_undeclared_metric_is_refused() -> None:
    with pytest.raises(KeyError, match="trivet_typo_total"):
        Meter().count("trivet_typo_total")


def test_names_follow_the_conventions_of_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("trivet_")
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert metric.buckets == tuple(sorted(metric.buckets))
        assert not metric.values or len(metric.labels) == 1
