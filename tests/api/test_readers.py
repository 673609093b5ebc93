"""A reader that has left costs nothing more, and one that does not read holds few bytes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from api.offload import ClientLeftError
from api.reads import while_staying, within
from api.reads.readers import _staying
from api.routes.tree import _FirstRows
from api.streams import Cursor
from api.streams.frames import Form, Frame, Round
from api.streams.subscriptions import Channel, Subscription
from service.jobs.events import newest_logged, rank_file, recorded
from service.jobs.store import Credential


def test_a_reader_that_leaves_ends_the_reading_of_a_long_record(tmp_path: Path) -> None:
    line = json.dumps({"type": "log", "stream": "stdout", "line": "x" * 1000}).encode() + b"\n"
    rank_file(tmp_path, 0).write_bytes(line * 3000)
    for read in (lambda check: recorded(tmp_path, {"log"}, check), lambda check: newest_logged(tmp_path, check)):
        looks = 0

        def check() -> None:
            nonlocal looks
            looks += 1
            if looks > 1:
                raise ClientLeftError

        assert 0 < len(list(while_staying(read(check)))) < 2_500


def test_a_closed_connection_is_seen_in_any_thread() -> None:
    async def told() -> None:
        messages = asyncio.Queue[dict[str, Any]]()
        request = Request({"type": "http", "headers": []}, messages.get)  # type: ignore[arg-type]
        staying = _staying(request)
        check = await anext(staying)
        await asyncio.to_thread(check)
        await messages.put({"type": "http.disconnect"})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(ClientLeftError):
            await asyncio.to_thread(check)
        await staying.aclose()

    asyncio.run(asyncio.wait_for(told(), 60))


def test_a_stream_that_is_not_read_holds_one_delivery_or_few_bytes() -> None:
    credential: Any = Credential
    form = Form(composite=False)
    slow = Subscription(credential, Cursor(), Channel({"j"}, None, everything=False), form, 4096, 10_000)

    def found(number: int, size: int) -> Round:
        frame = Frame("j", f"{number}-0", (number, 0), "log", b"x" * size, None)
        return Round((frame,), (frame.id,))

    assert slow.offer(found(1, 50_000)), "whatever one read has is delivered"
    assert not slow.offer(found(2, 1))
    assert len(slow.take()) > 50_000
    assert [slow.offer(found(number, 4_000)) for number in (3, 4, 5)] == [True, True, False]


def test_events_that_are_held_at_once_have_a_limit_in_bytes() -> None:
    events = [{"type": "span", "name": "x" * 100}] * 10
    assert len(list(within(events, 500))) == 4


def test_a_page_of_rows_has_a_limit_in_bytes_and_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.routes.tree._PAGE_BYTES", 1000)
    found = _FirstRows(10, 2)
    for instance in (5, 1, 4, 3, 2, 3):
        found.take({"instance": instance, "note": "x" * 400})
    assert (sorted(found.held), found.following) == ([2, 3], 4)
