"""Cursors and batches: whatever the order of arrival, a composite id resumes exactly after the event that bears it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.streams import Cursor
from api.streams.frames import Form, Frame, FrameBatch, batches, in_order
from service.jobs.store.tail import RawEvent, ReadEvents, parse_id

JOBS = ["job_a", "job_b", "job_c"]


def event(job_id: str, position: tuple[int, int], kind: str = "metric") -> RawEvent:
    payload = json.dumps({"type": kind, "state": "queued"}).encode()
    return RawEvent(job_id, f"{position[0]}-{position[1]}", kind, payload)


def whole_of(*events: RawEvent) -> ReadEvents:
    return ReadEvents(events, more_from=None)


_streams = st.fixed_dictionaries(
    {job: st.sets(st.tuples(st.integers(1, 6), st.integers(0, 2)), max_size=8).map(sorted) for job in JOBS}
)


def read(streams: dict[str, list[tuple[int, int]]], cursor: Cursor, count: int) -> list[Frame]:
    """One read of every stream after the cursor, as the hub does it: so many events of a job, and twice of all."""
    unread = {job: [at for at in each if at > parse_id(cursor.of(job))] for job, each in streams.items()}
    answer, left = {}, 2 * count
    for positions, job in sorted((positions, job) for job, positions in unread.items() if positions):
        chosen = positions[: min(count, left)]
        more_from = None if chosen == positions else (chosen or positions)[-1 if chosen else 0][0]
        answer[job] = ReadEvents(tuple(event(job, position) for position in chosen), more_from)
        left -= len(chosen)
    return in_order(batches(answer))


def drain(streams: dict[str, list[tuple[int, int]]], cursor: Cursor, count: int) -> list[tuple[str, str, str]]:
    """(job, id, composite id) of everything after the cursor."""
    seen = []
    while frames := read(streams, cursor, count):
        for frame in frames:
            cursor.advance(frame)
            seen.append((frame.job_id, frame.id, cursor.token))
    return seen


@settings(deadline=None)
@given(streams=_streams, count=st.integers(1, 10), cut=st.integers(0, 30))
def test_resuming_after_any_event_gives_exactly_the_rest(
    streams: dict[str, list[tuple[int, int]]], count: int, cut: int
) -> None:
    whole = drain(streams, Cursor(), count)
    assert sorted((job, frame) for job, frame, _ in whole) == sorted(
        (job, f"{ms}-{seq}") for job, positions in streams.items() for ms, seq in positions
    )
    if whole:
        cut %= len(whole)
        rest = drain(streams, Cursor.resume(whole[cut][2]), count)
        assert sorted(entry[:2] for entry in rest) == sorted(entry[:2] for entry in whole[cut + 1 :])


@settings(deadline=None)
@given(streams=_streams, count=st.integers(1, 10))
def test_a_cut_read_keeps_nothing_beyond_what_is_known_to_be_complete(
    streams: dict[str, list[tuple[int, int]]], count: int
) -> None:
    frames = read(streams, Cursor(), count)
    if frames:
        newest = frames[-1].position[0]
        missing = [p for positions in streams.values() for p in positions if p[0] < newest]
        delivered = {frame.position for frame in frames}
        assert all(position in delivered for position in missing)


@pytest.mark.parametrize(
    "token", ["", ";", "x", "1;a", "1;a=", "1;=3", "1;a=x", "-1;a=1", "1;a=1,", "1-2-3", "¹", "1;a=²"]
)
def test_what_is_no_position_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match=r"not|is"):
        Cursor.resume(token)


def test_a_frame_carries_its_job_and_id_and_stays_one_line() -> None:
    frame = Frame.of(RawEvent("job_a", "5-1", "log", b'{"type":"log","line":"a\\nb"}'))
    head, data, *rest = frame.body.decode().split("\n")
    assert head == "event: log"
    assert json.loads(data.removeprefix("data: ")) == {"job": "job_a", "id": "5-1", "type": "log", "line": "a\nb"}
    assert rest == ["", ""]
    found = Cursor().take([FrameBatch("job_a", (frame,))])
    assert found is not None
    assert found.encoded(Form(composite=False)).startswith(b"id: 5-1\nevent: log\n")
    assert found.encoded(Form(composite=True)).startswith(b"id: 5;job_a=1\nevent: log\n")


def test_bytes_are_encoded_once_for_all_who_want_the_same() -> None:
    found = Cursor().take(batches({"job_a": whole_of(event("job_a", (1, 0)), event("job_a", (2, 0), "log"))}))
    assert found is not None
    whole = found.encoded(Form(composite=True))
    assert found.encoded(Form(composite=True)) is whole
    logs = found.encoded(Form(composite=True, types=frozenset({"log"})))
    assert logs.count(b"event: ") == 1 < whole.count(b"event: ")
    assert logs.startswith(b"id: 2;job_a=0\n"), "who resumes there has what came before"


def test_jobs_that_are_shown_no_more_leave_the_cursor_and_cost_the_others_nothing() -> None:
    cursor = Cursor(base="1000-0")
    cursor.take(batches({job: whole_of(event(job, (at, 0))) for job, at in (("job_a", 20_000), ("job_b", 30_000))}))
    cursor.forget(["job_a", "job_c"], ["job_b", "job_d"])
    assert (cursor.of("job_b"), cursor.of("job_d")) == ("30000-0", "1000-0")
    assert cursor.of("job_a") == cursor.of("job_e") == "15000-0"


@settings(deadline=None)
@given(
    millisecond=st.integers(1, 2**40),
    known=st.integers(0, 2**40),
    level=st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)),
)
def test_what_may_be_unknown_survives_a_resumption(millisecond: int, known: int, level: dict[str, int]) -> None:
    cursor = Cursor(known=known)
    for job, sequence in level.items():
        cursor.advance(Frame.of(event(f"job_{job}", (millisecond, sequence))))
    if not level:
        return
    resumed = Cursor.resume(cursor.token)
    assert resumed.doubtful == (known <= millisecond)
    resumed.settle({"job_new": f"{known}-0", "job_old": f"{known - 1}-0" if known else "0-0"})
    if known and known < millisecond:
        assert parse_id(resumed.of("job_new")) < (known, 0)
        assert parse_id(resumed.of("job_old")) > (known, 0)
    assert all(resumed.of(f"job_{job}") == f"{millisecond}-{sequence}" for job, sequence in level.items())
