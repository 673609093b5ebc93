"""Ranks that hang: silence beyond the limit is noticed, and silence without a limit is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.supervisor.ending import StallWatch
from workers.supervisor.settings import SupervisorSettings

SETTINGS = SupervisorSettings(first_rank_within_s=10.0, stall_interval_s=0.0, stacks_within_s=0.0)


class Silent:
    """A relay of ranks that were last heard of an hour ago."""

    ranks: dict[int, Any]
    running = (0,)

    def __init__(self, heard_s_ago: float) -> None:
        self.ranks, self.heard_at = {0: None}, time.monotonic() - heard_s_ago
        self.asked = 0

    def ask_for_stacks(self) -> None:
        self.asked += 1


async def _disk(act: Callable[[], None]) -> None:
    await asyncio.to_thread(act)


@pytest.mark.parametrize(("stall_s", "expected"), [(60.0, True), (None, False)], ids=["a limit", "no limit"])
def test_an_hour_of_silence_is_a_stall_where_there_is_a_limit(
    tmp_path: Path, stall_s: float | None, expected: bool
) -> None:
    relay: Any = Silent(heard_s_ago=3600)
    watch = StallWatch(relay, tmp_path, stall_s, disk=_disk, publish_stacks=lambda *_: None, settings=SETTINGS)

    async def stalled() -> bool:
        async with asyncio.timeout(60):
            return await watch.stalled()

    assert asyncio.run(stalled()) == expected
    assert relay.asked == len(watch.hanging) == int(expected)
