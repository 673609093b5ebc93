"""Work that is repeated beside requests goes on whatever fails."""

from __future__ import annotations

import asyncio

import pytest

from api.server import repeat
from service.jobs.store import StoreUnavailable


def test_work_that_fails_is_logged_and_goes_on_until_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[Exception | float] = [StoreUnavailable("away"), ValueError("a defect"), 0.0]

    async def work() -> float | None:
        if not outcomes:
            return None
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    asyncio.run(asyncio.wait_for(repeat(work, 0.0), 60))
    assert not outcomes
    assert [str(each.exc_info and each.exc_info[1]) for each in caplog.records] == ["a defect"]
