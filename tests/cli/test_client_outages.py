"""Calls in an outage of the service: what bears repetition is repeated, for as long as it is said to be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cli_world import TRAIN, serving
from hypothesis import given
from hypothesis import strategies as st
from waiting import eventually

from service.jobs.settings import Settings
from service.jobs.store import Store
from trivet import Client, Refused, Unreachable
from trivet.connection import Patience

AWAY, BROKEN, UNSAFE = (
    Unreachable("http://here", "connection refused", sent=False),
    Unreachable("http://here", "connection reset"),
    Unreachable("http://here", "CERTIFICATE_VERIFY_FAILED", sent=False, passes=False),
)
NO_BROKER, NO_ROOM = Refused(503, "Service Unavailable", "no broker"), Refused(409, "Conflict", "is running")


class Time:
    """A clock that only sleep moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def patience(time: Time, outage_s: float = 60.0) -> Patience:
    made = Patience(outage_s, sleep=time.sleep, clock=lambda: time.now)
    made.outlast(lambda: "an answer", bears_repetition=True)
    return made


def fails(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


@pytest.mark.parametrize("error", [AWAY, BROKEN, NO_BROKER, Refused(502, "Bad Gateway", "x")])
def test_what_bears_repetition_is_repeated(error: Exception) -> None:
    assert patience(Time()).outlast(fails(error, error, error), bears_repetition=True) == "done"


def test_what_does_not_is_repeated_only_where_it_never_reached_the_service() -> None:
    assert patience(Time()).outlast(fails(AWAY, AWAY), bears_repetition=False) == "done"
    for error in (BROKEN, NO_BROKER):
        with pytest.raises(type(error)):
            patience(Time()).outlast(fails(AWAY, error), bears_repetition=False)


@pytest.mark.parametrize("error", [UNSAFE, NO_ROOM, Refused(401, "Unauthorized", "x"), Refused(500, "x", "x")])
def test_what_will_not_pass_is_told_at_once(error: Exception) -> None:
    time = Time()
    with pytest.raises(type(error)) as told:
        patience(time).outlast(fails(error), bears_repetition=True)
    assert told.value is error
    assert time.now == 0


@given(outage_s=st.floats(0, 3600))
def test_an_outage_is_outlasted_for_as_long_as_is_said_and_the_error_says_so(outage_s: float) -> None:
    time, tries = Time(), 0

    def call() -> None:
        nonlocal tries
        tries += 1
        raise AWAY

    with pytest.raises(Unreachable) as told:
        patience(time, outage_s).outlast(call, bears_repetition=True)
    assert outage_s - 2.0 <= time.now <= outage_s or time.now == 0
    assert (f"tried for {time.now:.0f} s" in str(told.value)) == (tries > 1)
    with pytest.raises(Refused, match="no broker; tried for"):
        patience(Time(), 5.0).outlast(fails(*[NO_BROKER] * 100), bears_repetition=True)


def test_a_service_that_never_answered_is_not_waited_for_as_one_that_did() -> None:
    time = Time()
    new = Patience(3600.0, sleep=time.sleep, clock=lambda: time.now)
    with pytest.raises(Unreachable):
        new.outlast(fails(*[AWAY] * 10_000), bears_repetition=True)
    assert time.now <= 2.0
    assert new.outlast(fails(NO_BROKER, *[AWAY] * 100), bears_repetition=True) == "done"


def test_an_outage_begins_wherever_a_long_call_breaks_off(tmp_path: Path) -> None:
    time, sent = Time(), 0

    def answer(request: httpx2.Request) -> httpx2.Response:
        nonlocal sent
        sent += 1
        if sent in (1, 3):
            return httpx2.Response(200, stream=BrokenOff(time))
        return httpx2.Response(503) if sent < 8 else httpx2.Response(200, content=b"whole")

    with Client("http://127.0.0.1:1", "key", outage_s=60.0) as client:
        client._connection._http._transport = httpx2.MockTransport(answer)
        client._connection.patience = Patience(60.0, sleep=time.sleep, clock=lambda: time.now)
        target = tmp_path / ("a" * 250)
        assert client.download("job_x", "model", target) == 5
    assert target.read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_call_that_always_breaks_off_comes_to_an_end() -> None:
    time, tries = Time(), 0
    outlasting = patience(time)

    def call() -> None:
        nonlocal tries
        tries += 1
        outlasting.note_answer()
        time.now += 100
        if tries < 100:
            raise BROKEN

    with pytest.raises(Unreachable, match="connection reset; tried for 10"):
        outlasting.outlast(call, bears_repetition=True)


class BrokenOff(httpx2.SyncByteStream):
    """A body that comes for a hundred seconds, and breaks off."""

    def __init__(self, time: Time) -> None:
        self._time = time

    def __iter__(self) -> Iterator[bytes]:
        yield b"wh"
        self._time.now += 100
        raise httpx2.ReadError("cut")


def noting(client: Client) -> set[int]:
    """The threads whose calls have not reached the service, from now on."""
    failed: set[int] = set()
    send = client._connection.send

    def noted(*arguments: Any, **options: Any) -> Any:
        try:
            return send(*arguments, **options)
        except Unreachable:
            failed.add(threading.get_ident())
            raise

    client._connection.send = noted  # type: ignore[method-assign]
    return failed


@pytest.mark.slow
def test_calls_outlast_a_restart(cli_settings: Settings, secret: str, store: Store, tmp_path: Path) -> None:
    """Also the creation of a key, which must not be repeated blindly: it never reached the service."""
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    with ExitStack() as held, ThreadPoolExecutor() as pool:
        with serving(cli_settings, store) as first:
            client = held.enter_context(Client(first, secret))
            client.hosts()
        calls: list[Callable[[], Any]] = [
            lambda: client.submit(TRAIN).id,
            lambda: client.job_page(state="failed").items,
            lambda: client.upload(path).bytes,
            lambda: client.keys.create("ada")[0].name,
            lambda: client.cancel("job_" + 20 * "0"),
        ]
        failed = noting(client)
        called = [pool.submit(call) for call in calls]
        eventually(lambda: len(failed) == len(calls))
        held.enter_context(serving(cli_settings, store, int(first.rpartition(":")[2])))
        *answers, refused = (each.exception() or each.result() for each in called)
    assert answers == [store.jobs.list().items[0].id, (), 5, "ada"]
    assert len(store.jobs.list().items) == 1
    assert isinstance(refused, Refused)
    assert "there is no job" in str(refused)
