"""When a delivery is tried again: rules for every number of attempts and every chance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.records.webhooks import RetrySchedule, sign

DAY = RetrySchedule(86_400.0)
chances = st.floats(0, 1, exclude_max=True)


@given(attempts=st.integers(1, 10_000), passed=st.floats(0, 200_000), chance=chances)
def test_a_pause_is_within_its_bounds_and_ends_in_time(attempts: int, passed: float, chance: float) -> None:
    pause = DAY.pause(attempts, passed, chance)
    if pause is None:
        assert passed + 1.5 * DAY.longest_s > DAY.total_s
    else:
        assert DAY.first_s / 2 <= pause <= 1.5 * DAY.longest_s
        assert passed + pause <= DAY.total_s


@given(st.lists(chances, min_size=200, max_size=200))
def test_pauses_double_up_to_an_hour_and_come_to_an_end(drawn: list[float]) -> None:
    passed, attempts = 0.0, 1
    while (pause := DAY.pause(attempts, passed, drawn[attempts % len(drawn)])) is not None:
        assert pause >= min(DAY.longest_s, DAY.first_s * 2 ** (attempts - 1)) / 2
        passed, attempts = passed + pause, attempts + 1
    assert 20 < attempts < 100


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_*", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"])
def test_what_is_no_secret_signs_nothing(secret: str) -> None:
    with pytest.raises(ValueError, match="not a webhook's secret"):
        sign(secret, "msg_1", 1, b"{}")
