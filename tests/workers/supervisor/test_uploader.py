"""The way of events from the relay to the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_fleet import Fleet

from service.jobs.events import MetricEvent
from service.jobs.records import AttemptRef
from service.jobs.records.webhooks import ReachedThreshold
from service.jobs.spec.common import NotifySpec
from service.jobs.store import Attempts, StoreUnavailable
from workers import event_protocol
from workers.supervisor.logs import GrowingFile
from workers.supervisor.settings import SupervisorSettings
from workers.supervisor.uploader import Thresholds, Uploader


@pytest.fixture
def ref(fleet: Fleet) -> AttemptRef:
    """A claimed part, without any process."""
    ref = fleet.submit("nothing")
    fleet.store.attempts.claim(ref, "tester")
    return ref


def upload(
    fleet: Fleet, ref: AttemptRef, record: Path, lines: int, *, capacity: int = 50_000, attempts: Attempts | None = None
) -> list[str]:
    """Send log lines before the sending starts; what was said about losing the attempt, or about the disk."""
    said: list[str] = []

    async def on_disk(act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            said.append(str(error.strerror))

    async def work() -> None:
        uploader = Uploader(
            attempts or fleet.store.attempts,
            ref,
            GrowingFile(record),
            lambda: said.append("lost"),
            thresholds=Thresholds(None),
            disk=on_disk,
            settings=SupervisorSettings(upload_capacity=capacity),
        )
        for number in range(lines):
            uploader.put(event_protocol.log_event(f"line {number}"))
        for done in (1, 2, 3):
            uploader.put({"type": "progress", "time": 0.0, "rank": 0, "done": done, "total": 9, "unit": "steps"})  # type: ignore[typeddict-unknown-key]
        uploader.close()
        await uploader.run()

    asyncio.run(work())
    return said


def test_events_arrive_in_order_and_are_on_record(fleet: Fleet, ref: AttemptRef, tmp_path: Path) -> None:
    assert upload(fleet, ref, tmp_path / "events.jsonl", 1000) == []
    expected = [f"line {number}" for number in range(1000)]
    assert [event["line"] for event in fleet.events(ref, "log")] == expected
    recorded = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["line"] for event in recorded if event["type"] == "log"] == expected
    progress = fleet.job(ref).progress
    assert progress is not None
    assert progress.done == 3
    assert [event["done"] for event in fleet.events(ref, "progress")] == [3]


def test_the_end_does_not_wait_for_the_pause_between_two_batches(fleet: Fleet, ref: AttemptRef, tmp_path: Path) -> None:
    async def at_once(act: Callable[[], None]) -> None:
        act()

    async def work() -> None:
        settings, record = SupervisorSettings(upload_interval_s=3600.0), GrowingFile(tmp_path / "events.jsonl")
        uploader = Uploader(
            fleet.store.attempts,
            ref,
            record,
            lambda: None,
            thresholds=Thresholds(None),
            disk=at_once,
            settings=settings,
        )
        sending = asyncio.create_task(uploader.run())
        for line in ("first", "last"):
            uploader.put(event_protocol.log_event(line))
            while line == "first" and not fleet.printed(ref, "first"):
                await asyncio.sleep(0.01)
        uploader.close()
        await sending

    asyncio.run(work())
    assert [event["line"] for event in fleet.events(ref, "log")] == ["first", "last"]


def test_what_does_not_fit_is_on_record_and_counted(fleet: Fleet, ref: AttemptRef, tmp_path: Path) -> None:
    upload(fleet, ref, tmp_path / "events.jsonl", 30, capacity=20)
    relayed = [event["line"] for event in fleet.events(ref, "log")]
    assert relayed[:20] == [f"line {number}" for number in range(20)]
    assert relayed[20:] == ["13 events were not relayed; they are in the attempt's record"]
    assert "line 29" in (tmp_path / "events.jsonl").read_text()


def test_a_full_disk_is_told_once_and_ends_the_record_but_not_the_relay(
    fleet: Fleet, ref: AttemptRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("ab", buffering=0) as full:
        monkeypatch.setattr(GrowingFile, "open", lambda _: full)
        assert upload(fleet, ref, tmp_path / "events.jsonl", 500) == ["No space left on device"]
    assert len(fleet.events(ref, "log")) == 500


class Deaf(Attempts):
    """Hears no answer to every other call, although it took effect."""

    calls = 0

    def emit(self, *args: Any) -> None:
        super().emit(*args)
        Deaf.calls += 1
        if Deaf.calls % 2:
            raise StoreUnavailable("the answer was lost")


def test_a_batch_whose_answer_was_lost_is_sent_again_but_not_appended_again(
    fleet: Fleet, ref: AttemptRef, tmp_path: Path
) -> None:
    attempts = Deaf(fleet.store.attempts.client, fleet.store.attempts.limits)
    assert upload(fleet, ref, tmp_path / "events.jsonl", 600, attempts=attempts) == []
    assert Deaf.calls > 3
    assert [event["line"] for event in fleet.events(ref, "log")] == [f"line {number}" for number in range(600)]


def test_a_superseded_attempt_is_told_once_and_sends_no_more(fleet: Fleet, ref: AttemptRef, tmp_path: Path) -> None:
    stale = AttemptRef(ref.job_id, 7, ref.host)
    assert upload(fleet, stale, tmp_path / "events.jsonl", 1000) == ["lost"]
    assert fleet.events(ref, "log") == []


def test_a_call_has_no_more_bytes_than_it_may_and_long_events_wait_on_disk(tmp_path: Path) -> None:
    """The broker takes a call only as a whole, and the supervisor holds what waits in memory."""
    calls: list[int] = []

    class Counting:
        def emit(self, _: AttemptRef, events: list[Any], *rest: Any) -> None:
            calls.append(len(events))

    async def now(act: Callable[[], None]) -> None:
        act()

    async def work() -> None:
        attempts: Any = Counting()
        uploader = Uploader(
            attempts,
            AttemptRef("job_1", 1, "a"),
            GrowingFile(tmp_path / "events"),
            lambda: None,
            thresholds=Thresholds(None),
            disk=now,
            settings=SupervisorSettings(upload_batch_bytes=2_500, upload_full_bytes=10_000),
        )
        for number in range(10):
            assert uploader.has_room, number
            uploader.relay(event_protocol.log_event("x" * 1_000))
        assert not uploader.has_room
        uploader.close()
        await uploader.run()

    asyncio.run(work())
    assert calls == [3, 3, 3, 1]


def test_a_threshold_that_was_reached_in_an_outage_is_told_after_it(tmp_path: Path) -> None:
    told: list[list[str]] = []

    class Interrupted:
        def emit(self, _: AttemptRef, __: list[Any], ___: Any, batch: int, reached: list[ReachedThreshold]) -> None:
            if batch == 1:
                raise StoreUnavailable("no broker")
            told.append([each.name for each in reached])

    async def now(act: Callable[[], None]) -> None:
        act()

    async def work() -> None:
        attempts: Any = Interrupted()
        uploader = Uploader(
            attempts,
            AttemptRef("job_1", 1, "a"),
            GrowingFile(tmp_path / "events"),
            lambda: None,
            thresholds=Thresholds(NotifySpec(webhook="https://ci.example.org/", when={"loss": "< 1"})),
            disk=now,
            settings=SupervisorSettings(report_within_s=0.0, upload_batch=1),
        )
        for step in (1, 2, 3):
            metric: MetricEvent = {"type": "metric", "time": 1.0, "rank": 0, "step": step, "values": {"loss": 0.5}}
            uploader.relay(metric)
        uploader.close()
        await uploader.run()

    asyncio.run(work())
    assert told[:2] == [["loss"], []]
