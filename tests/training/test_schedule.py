"""Rules of the learning-rate schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.spec.train import ScheduleSpec
from service.training.loop import learning_rate

runs = st.tuples(st.integers(1, 500), st.integers(0, 500), st.floats(0, 1))


@given(run=runs, decay=st.sampled_from(["constant", "cosine"]), peak=st.floats(1e-6, 10))
def test_rate_rises_to_the_peak_and_never_rises_again(run: tuple[int, int, float], decay: str, peak: float) -> None:
    steps, warmup, floor = run
    schedule = ScheduleSpec.model_validate({"warmup": warmup, "decay": decay, "floor": floor})
    rates = [learning_rate(schedule, peak, step, steps) for step in range(steps)]
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates[: warmup or 1])
    assert all(left < right for left, right in pairwise(rates[:warmup]))
    assert all(left >= right for left, right in pairwise(rates[warmup:]))
    assert all(rate >= floor * peak * (1 - 1e-12) for rate in rates[warmup:])


def test_cosine_ends_at_the_floor_and_is_halfway_in_the_middle() -> None:
    schedule = ScheduleSpec(warmup=10, decay="cosine", floor=0.2)
    assert learning_rate(schedule, 2.0, 0, 111) == pytest.approx(0.2)
    assert learning_rate(schedule, 2.0, 9, 111) == 2.0
    assert learning_rate(schedule, 2.0, 10, 111) == 2.0
    assert learning_rate(schedule, 2.0, 60, 111) == pytest.approx(1.2)
    assert learning_rate(schedule, 2.0, 110, 111) == pytest.approx(0.4)


def test_constant_stays() -> None:
    assert learning_rate(ScheduleSpec(decay="constant"), 0.5, 99, 100) == 0.5
