"""Expensive reads have turns: nobody's many reads keep those of others waiting."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from select import select
from typing import Any

import httpx2
import pytest
from api_world import Keys, Server, bearer, serving
from waiting import eventually

from api.offload import FairTurns
from api.requests import ProblemError
from service.jobs.settings import Settings
from service.jobs.store import Store
from service.jobs.store.listing import Listing


async def ask(turns: FairTurns, key: str, order: list[str], end: asyncio.Event) -> None:
    async with turns.turn(key):
        order.append(key)
        await end.wait()


async def step() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_keys_come_by_turns_however_much_one_of_them_asks() -> None:
    async def run() -> list[str]:
        turns, order, end = FairTurns(8, at_once=1), list[str](), asyncio.Event()
        asking = [asyncio.create_task(ask(turns, key, order, end)) for key in "aaaabbc"]
        await step()
        assert order == ["a"]
        end.set()
        await asyncio.gather(*asking)
        return order

    assert asyncio.run(run()) == ["a", "a", "b", "c", "a", "b", "a"]


def test_a_turn_that_is_left_or_given_back_goes_to_the_next() -> None:
    async def run() -> None:
        turns, order, end = FairTurns(8, at_once=1), list[str](), asyncio.Event()
        first = asyncio.create_task(ask(turns, "a", order, end))
        await step()
        left = asyncio.create_task(ask(turns, "b", order, end))
        await step()
        left.cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(left, return_exceptions=True)
            assert not turns.is_asked_for
            end.set()
            await first
            async with turns.turn("a") as turn:
                turn.give_back()
                turn.give_back()
                async with turns.turn("b"):
                    third = asyncio.create_task(ask(turns, "c", order, end))
                    await step()
                    assert order == ["a"]
            await third
        assert order == ["a", "c"]

    asyncio.run(run())


def test_one_key_may_not_ask_for_more_and_others_may() -> None:
    async def run() -> None:
        turns, order, end = FairTurns(2, at_once=1), list[str](), asyncio.Event()
        asking = [asyncio.create_task(ask(turns, key, order, end)) for key in "aa"]
        await step()
        with pytest.raises(ProblemError, match="2 expensive requests of this key") as refused:
            await ask(turns, "a", order, end)
        assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
        other = asyncio.create_task(ask(turns, "b", order, end))
        end.set()
        await asyncio.gather(*asking, other)
        await ask(turns, "a", order, end)
        assert order == ["a", "a", "b", "a"]

    asyncio.run(run())


@pytest.fixture
def narrow(settings: Settings, store: Store) -> Iterator[Server]:
    with serving(settings.model_copy(update={"max_reads_per_key": 2}), store) as server:
        yield server


def test_a_keys_third_expensive_read_at_once_is_refused_and_anothers_is_not(
    narrow: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Semaphore(0), threading.Event()
    count = Listing.counts

    def held(self: Listing, *arguments: Any) -> Any:
        begun.release()
        go.wait(300)
        return count(self, *arguments)

    monkeypatch.setattr(Listing, "counts", held)

    def read(secret: str, path: str = "/v1/jobs:counts") -> httpx2.Response:
        return httpx2.get(f"{narrow.url}{path}", headers=bearer(secret), timeout=300)

    greedy, other = keys["read"], keys["submit"]
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(read, greedy)
        try:
            assert begun.acquire(timeout=300)
            answered, waiting = wait([threads.submit(read, greedy) for _ in range(2)], return_when=FIRST_COMPLETED)
            (refused,) = (each.result() for each in answered)  # whichever came last
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.headers["content-type"] == "application/problem+json"
            assert read(greedy, "/v1/jobs").status_code == 200, "a plain list is no expensive read"
            assert read(other, "/v1/queue").status_code == 200
        finally:
            go.set()
        assert [each.result().status_code for each in (first, *waiting)] == [200, 200]
    eventually(lambda: read(greedy).status_code == 200)
    assert read("tvt_none_such").status_code == 401


def test_a_keys_long_bodies_come_one_at_a_time_and_anothers_beside_them(narrow: Server, keys: Keys) -> None:
    head = (
        f"POST /v1/jobs:batch HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {keys['submit']}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    )

    def post(secret: str, body: bytes) -> int:
        address, headers = f"{narrow.url}/v1/jobs:batch", {**bearer(secret), "Content-Type": "application/json"}
        return httpx2.post(address, content=body, headers=headers, timeout=300).status_code

    where = httpx2.URL(narrow.url)
    with ExitStack() as opened:
        slow = [opened.enter_context(socket.create_connection((where.host, where.port or 80))) for _ in range(3)]
        for each in slow:
            each.sendall(head.encode())
        (refused,), _, _ = select(slow, [], [], 300)
        assert refused.recv(1000).startswith(b"HTTP/1.1 429 "), "the last one of three, with two allowed"
        assert post(keys["submit"], b"{") == 422, "a short body needs no turn"
        assert post(keys["admin"], b"{" + b" " * 100_000) == 422, "another key's has its own"
    eventually(lambda: post(keys["submit"], b"{" + b" " * 100_000) == 422)
