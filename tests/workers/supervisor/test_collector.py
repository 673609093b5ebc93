"""What the collector makes of the files of ranks: lines that are no events, and its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.jobs.events import Event, MalformedEvent, rank_file
from service.jobs.events.curves import read_curves
from service.jobs.records import AttemptRef
from service.jobs.store.tail import EventPage, StoredEvent
from workers.event_protocol import log_event
from workers.supervisor.collector import Collector, find_unrelayed
from workers.supervisor.settings import SupervisorSettings


class Room:
    """An uploader that has room, and a relay that one rank has greeted."""

    ranks = frozenset({0})
    heard_at = 0.0

    def __init__(self) -> None:
        self.said: list[Any] = []

    async def room(self) -> None:
        await asyncio.sleep(0)

    def put(self, event: Event) -> None:
        self.said.append(event)

    def complain(self, error: MalformedEvent, rank: int) -> None:
        self.said.append(log_event(str(error), rank=rank))


async def recover(_: Event | None) -> None:
    await asyncio.sleep(0)


def collect(folder: Path, taken: list[Any] | None = None, recover: Any = recover) -> tuple[list[Any], list[Any]]:
    """Read what the ranks have left to its end; return the events that were taken, and what was said of the others."""
    taken, both = [] if taken is None else taken, Room()
    uploader: Any = both

    async def disk(act: Callable[[], None]) -> None:
        await asyncio.to_thread(act)

    settings = SupervisorSettings()
    asyncio.run(
        Collector(folder, uploader, uploader, take=taken.append, recover=recover, disk=disk, settings=settings).finish()
    )
    return taken, both.said


def test_malformed_events_are_logged_and_harm_nobody(tmp_path: Path) -> None:
    with rank_file(tmp_path, 0).open("wb") as file:
        file.write(b'not json\n["a list"]\n{"type": "state", "state": "succeeded"}\n{"type": "metric", "step": "x"}\n')
        file.write(b'{"type": "log", "stream": "stdout", "line": "' + b"x" * (1 << 20) + b'"}\n')
        file.write(b'{"type": "metric", "step": 7, "values": {"loss": null}}\n')
    taken, said = collect(tmp_path)
    reasons = ("not JSON", "not a JSON object", "the type is none of", "needs 'step' (int)", "is longer than")
    assert len(said) == len(reasons)
    for reason, event in zip(reasons, said, strict=True):
        assert event["line"].startswith("malformed event")
        assert reason in event["line"]
    assert [(event["step"], event["values"]) for event in taken] == [(7, {"loss": None})]


@pytest.mark.parametrize("odd", [b"x" * (5 << 20) + b"\n", b"\0" * 100])
def test_what_no_writer_of_events_wrote_ends_the_reading_of_a_file_and_says_so(tmp_path: Path, odd: bytes) -> None:
    metric = b'{"type": "metric", "step": %d, "values": {"loss": null}}\n'
    with rank_file(tmp_path, 0).open("wb") as file:
        file.write(metric % 7 + odd)
        file.truncate(1 << 40)  # costs the rank nothing
        file.write(metric % 8)
    taken, said = collect(tmp_path)
    assert [event["step"] for event in taken] == [7]
    assert ["the rest of what this rank recorded is not read" in event["line"] for event in said] == [True]


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

    both: Any = Room()
    settings = SupervisorSettings(read_interval_s=0.0)
    collector = Collector(folder, both, both, take=taken.append, recover=recover, disk=disk, settings=settings)
    following = asyncio.create_task(collector.run())
    await reading.wait()
    await collector.finish()
    await asyncio.wait_for(following, 60)
    assert len(taken) == 1


def test_what_an_earlier_attempt_left_is_recovered_once_before_the_first_metric(tmp_path: Path) -> None:
    with rank_file(tmp_path, 0).open("wb") as file:
        file.write(b'{"type":"progress","done":1,"total":9,"unit":"steps"}\n')
        file.write(
            b'{"type":"metric","step":7,"values":{"loss":1.0}}\n{"type":"metric","step":8,"values":{"loss":1.0}}\n'
        )
    order: list[Any] = []

    async def recover_before(event: Event | None) -> None:
        await asyncio.sleep(0)
        metric: Any = event
        order.append(("recovered before", metric["step"]))

    collect(tmp_path, order, recover_before)
    assert [each if isinstance(each, tuple) else each["type"] for each in order] == [
        "progress", ("recovered before", 7), "metric", "metric",
    ]  # fmt: skip


def test_the_first_metric_of_a_trimmed_stream_is_not_relayed_again(tmp_path: Path) -> None:
    metrics: list[Any] = [
        {"type": "metric", "time": 1.0 * step, "rank": 0, "step": step, "values": {"loss": 1.0}} for step in (1, 2, 3)
    ]
    attempt = tmp_path / "1"
    attempt.mkdir()
    rank_file(attempt, 0).write_text("".join(f"{json.dumps(each)}\n" for each in metrics))
    stored = [StoredEvent(str(each["step"]), each) for each in metrics]

    class Trimmed:
        def page(self, _: str, after: str = "0", **__: object) -> EventPage:
            begin = max(1, int(after))
            items = stored[begin : begin + 1]
            return EventPage(items, items[-1].id if items else after, gap=after == "0")

    store: Any = SimpleNamespace(events=Trimmed())
    assert find_unrelayed(store, AttemptRef("job_1", 2, "a"), tmp_path, None) == []


def test_thinned_curves_are_left_beside_the_record_at_the_end(tmp_path: Path) -> None:
    lines = [
        json.dumps({"type": "metric", "time": 1.0, "step": step, "values": {"loss": 2.0 - step}}) for step in (1, 2)
    ]
    rank_file(tmp_path, 0).write_text("\n".join([*lines, "no event", ""]))
    collect(tmp_path)
    assert read_curves([tmp_path], None, 100) is None, "a short record is read as soon itself"
    rank_file(tmp_path, 0).write_text("\n".join([*lines, "no event" + " " * (64 << 10), ""]))
    collect(tmp_path)
    found = read_curves([tmp_path], None, 100)
    assert found is not None
    assert (found[0], found[1]["loss"].step, found[1]["loss"].value) == (["loss"], [1, 2], [1.0, 0.0])
