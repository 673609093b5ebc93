"""Thinned series keep their ends and their extremes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.routes import metrics
from api.routes.metrics import collect
from service.jobs.events.curves import downsample

numbers = st.none() | st.floats()


@given(values=st.lists(numbers, max_size=300), max_points=st.integers(4, 50))
def test_ends_and_extremes_survive(values: list[float | None], max_points: int) -> None:
    kept = downsample(values, max_points)
    assert len(kept) <= max_points
    assert kept == sorted(set(kept))
    assert len(kept) == len(values) or len(values) > max_points
    if values:
        assert (kept[0], kept[-1]) == (0, len(values) - 1)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    left = [value for value in (values[index] for index in kept) if value is not None and math.isfinite(value)]
    if finite:
        assert (min(left), max(left)) == (min(finite), max(finite))


def test_a_short_series_is_kept_whole() -> None:
    assert downsample([3.0, None, math.nan], 4) == [0, 1, 2]


def test_every_spike_is_kept() -> None:
    values: list[float | None] = [0.0] * 10_000
    spikes = {37: 5.0, 5_000: -7.0, 9_998: 9.0}
    for index, value in spikes.items():
        values[index] = value
    assert set(spikes) <= set(downsample(values, 100))


def test_points_are_spread_over_the_series() -> None:
    kept = downsample([float(index) for index in range(10_000)], 102)
    gaps = [after - before for before, after in itertools.pairwise(kept)]
    assert len(kept) == 102
    assert max(gaps) <= 201


def test_a_stretch_without_numbers_leaves_one_point() -> None:
    kept = downsample([1.0] + [math.nan] * 100 + [2.0], 12)
    assert len(kept) == 7


@pytest.mark.parametrize("max_points", [3, 0, -1])
def test_too_few_points_are_refused(max_points: int) -> None:
    with pytest.raises(ValueError, match="4 or more"):
        downsample([1.0], max_points)


def test_points_are_held_up_to_a_number_however_many_a_job_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_POINTS", 1000)
    told = (
        {"time": 0.0, "step": step, "values": {"loss": -float(step), "spike": float(step == 70)}}
        for step in range(5000)
    )
    found = collect(told, None, 50)
    assert all(len(points) <= 1000 for points in found.values())
    assert (min(found["loss"]), max(found["loss"])) == (0, 4999)
    assert found["spike"][70] == (0.0, 1.0)
    names = ({"time": 0.0, "step": 1, "values": {f"name {number}": 1.0}} for number in range(5000))
    assert len(collect(names, None, 50)) == 1000
