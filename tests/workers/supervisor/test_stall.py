"""Ranks that hang: silence beyond the limit is noticed, and silence without a limit is not."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.supervisor.rank_socket import Admission, Rank, RankSocket
from workers.supervisor.settings import SupervisorSettings
from workers.supervisor.stall_watch import StallWatch

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

    def forked_by(self, rank: int) -> list[int]:
        return []


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
            return await watch.wait_for_stall()

    assert asyncio.run(stalled()) == expected
    assert relay.asked == len(watch.hanging) == int(expected)


FORKING = """
import os, subprocess, sys, time
from pathlib import Path
from workers.rank.stacks import write_on_request

def hang_in_a_fork():
    time.sleep(3600)

def wait_for_it(pid):
    print(pid, subprocess.Popen(["sleep", "3600"]).pid, flush=True)
    os.waitpid(pid, 0)

write_on_request(Path(sys.argv[1]), 0)
pid = os.fork()
if not pid:
    hang_in_a_fork()
wait_for_it(pid)
"""


def test_processes_that_a_hanging_rank_has_forked_say_where_they_are(tmp_path: Path) -> None:
    """What answers no such request, as a compiler, and would end by it, is not asked."""
    published: list[str] = []
    settings = SupervisorSettings(stall_interval_s=0.0, stacks_within_s=2.0)
    with subprocess.Popen([sys.executable, "-c", FORKING, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        fork, other = map(int, process.stdout.readline().split())

        async def stalled() -> StallWatch:
            relay = RankSocket(
                tmp_path / "socket", tmp_path, published.append, published.append, lambda: None,
                Admission("s3cret", range(1), os.getpid()), settings,
            )  # fmt: skip
            ours, _ = socket.socketpair()
            relay.ranks[0] = Rank(0, ours, process.pid, os.pidfd_open(process.pid))
            relay.heard_at = time.monotonic() - 3600
            watch = StallWatch(
                relay,
                tmp_path,
                60.0,
                disk=_disk,
                publish_stacks=lambda _, text: published.append(text),
                settings=settings,
            )
            assert await watch.wait_for_stall()
            return watch

        try:
            hanging = asyncio.run(stalled()).hanging[0]
        finally:
            for pid in (fork, other, process.pid):
                os.kill(pid, signal.SIGKILL)
    assert hanging.startswith("wait_for_it (<string>:")
    assert hanging.endswith(" (its processes at hang_in_a_fork (<string>:7))")
    rank, fork_said = published[0].split(f"Process {fork}, which this rank has forked:")
    assert "wait_for_it" in rank
    assert "hang_in_a_fork" in fork_said
    assert str(other) not in published[0]
