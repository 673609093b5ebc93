"""What a supervisor takes for the word of a rank."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
from pathlib import Path
from typing import Any

from service.jobs.host import Process
from service.jobs.runtime import connect
from workers.event_protocol import end_early
from workers.forks import threads
from workers.rank.stacks import answers
from workers.supervisor.rank_socket import Admission, RankSocket, is_descendant
from workers.supervisor.settings import SupervisorSettings

_PR_SET_NAME, _PR_GET_NAME = 15, 16


async def greeted(folder: Path, ranks: int, said: list[Any]) -> tuple[RankSocket, socket.socket]:
    """A socket of a supervisor, and the connection by which the first rank has greeted."""
    relay = RankSocket(
        folder / "socket", folder, said.append, said.append, lambda: None,
        Admission("s3cret", range(ranks), os.getppid()), SupervisorSettings(),
    )  # fmt: skip
    await relay.start()
    first = await asyncio.to_thread(connect, str(relay.address), 0, "control", "s3cret")
    async with asyncio.timeout(60):
        while 0 not in relay.ranks:
            await asyncio.sleep(0.01)
    return relay, first


def test_a_rank_that_greets_later_is_asked_to_end_early_too(tmp_path: Path) -> None:
    async def hear() -> list[bytes]:
        relay, first = await greeted(tmp_path, 2, [])
        async with asyncio.timeout(60):
            for reason in ("it does worse", "it is told again"):
                relay.end_early(reason)
            second = await asyncio.to_thread(connect, str(relay.address), 1, "control", "s3cret")
            heard = [await asyncio.to_thread(each.recv, 4096) for each in (first, second)]
        first.close()
        second.close()
        await relay.drain()
        return heard

    assert asyncio.run(hear()) == [end_early("it does worse")] * 2


def test_a_second_connection_does_not_speak_for_a_rank(tmp_path: Path) -> None:
    said: list[Any] = []

    async def greet_twice() -> RankSocket:
        relay, first = await greeted(tmp_path, 1, said)
        async with asyncio.timeout(60):
            with await asyncio.to_thread(connect, str(relay.address), 0, "control", "s3cret") as second:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # hung up on already
                    second.sendall(b'{"type": "done"}\n')
                while not said and not relay.ranks[0].done:
                    await asyncio.sleep(0.01)
        first.close()
        await relay.drain()
        return relay

    relay = asyncio.run(greet_twice())
    assert not relay.ranks[0].done
    assert "greeted twice" in said[0]["line"]


def test_a_process_whose_name_is_cut_within_a_letter_is_known_all_the_same() -> None:
    """The kernel keeps 15 bytes of a name."""
    name, libc = ctypes.create_string_buffer(16), ctypes.CDLL(None)
    libc.prctl(_PR_GET_NAME, name)
    libc.prctl(_PR_SET_NAME, b"x" * 14 + "ß".encode())
    try:
        assert Process.of(os.getpid()) is not None
        assert is_descendant(os.getpid(), os.getppid())
        assert answers(os.getpid()) in (False, True)
        assert any(each.startswith("x" * 14) for each in threads())
    finally:
        libc.prctl(_PR_SET_NAME, name)
