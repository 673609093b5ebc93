"""The collector's end: what is read after it must not touch the files that it has closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.jobs.event_files import rank_file
from service.jobs.events import Event
from workers.supervisor.collector import Collector
from workers.supervisor.settings import SupervisorSettings


class Room:
    """An uploader that has room, and a relay that one rank has greeted."""

    ranks = frozenset({0})
    heard_at = 0.0

    async def room(self) -> None:
        await asyncio.sleep(0)


def test_a_turn_that_was_waiting_when_the_collector_finished_reads_nothing(tmp_path: Path) -> None:
    asyncio.run(_finish_between_turns(tmp_path))


async def _finish_between_turns(folder: Path) -> None:
    rank_file(folder, 0).write_bytes(b'{"type":"log","time":1.0,"rank":0,"line":"m","stream":"stdout"}\n')
    taken: list[Event] = []
    reading = asyncio.Event()

    async def disk(act: Callable[[], None]) -> None:
        reading.set()
        await asyncio.sleep(0)
        act()

    async def recover(event: Event | None) -> None:
        await asyncio.sleep(0)

    both: Any = Room()
    settings = SupervisorSettings(read_interval_s=0.0)
    collector = Collector(folder, both, both, take=taken.append, recover=recover, disk=disk, settings=settings)
    following = asyncio.create_task(collector.run())
    await reading.wait()
    await collector.finish()
    await asyncio.wait_for(following, 60)
    assert len(taken) == 1
