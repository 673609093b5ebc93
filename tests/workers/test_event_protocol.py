"""Lines, greetings and events as input: bounded, checked, never fatal."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.routes.logs import _as_line
from service.jobs.events import EVENT_TYPES, MalformedEvent, parse_event
from service.jobs.records import Progress
from workers.event_protocol import Done, Greeting, LineSplitter, Terminated, TextLine, parse_greeting, parse_last_word
from workers.supervisor.logs import TokenBucket, printable


def split(chunks: list[bytes], bound: int) -> list[TextLine]:
    splitter = LineSplitter(bound)
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()


@given(st.lists(st.text("ab\r\n", max_size=12).map(str.encode), max_size=12), st.integers(1, 8))
def test_lines_do_not_depend_on_how_the_stream_is_cut(chunks: list[bytes], bound: int) -> None:
    whole = [text.rstrip(b"\r").rpartition(b"\r")[2] for text in b"".join(chunks).split(b"\n")]
    expected = [TextLine(text[:bound], max(len(text) - bound, 0)) for text in whole]
    if expected[-1] == TextLine(b""):
        expected.pop()
    assert split(chunks, bound) == expected


def test_an_endless_line_takes_bounded_memory() -> None:
    splitter = LineSplitter(100)
    for _ in range(1000):
        assert splitter.feed(b"x" * 1000) == []
        assert len(splitter._held) <= 100
    assert splitter.feed(b"\n") == [TextLine(b"x" * 100, 1_000_000 - 100)]


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"plain", "plain"),
        (b" 10%|#\r 50%|###\r100%|#####", "100%|#####"),
        (b"windows\r", "windows"),
        (b"\xff\xfe", "��"),
        (b"long, longer", "long, long … [2 more bytes]"),
    ],
)
def test_lines_as_on_a_terminal(printed: bytes, shown: str) -> None:
    assert [printable(line) for line in split([printed, b"\n"], 10)] == [shown]


def test_allowance_refills_with_time_and_never_beyond_its_burst() -> None:
    allowance = TokenBucket(rate=2, burst=3, now=0)
    assert [allowance.take(0) for _ in range(4)] == [True, True, True, False]
    assert [allowance.take(1) for _ in range(3)] == [True, True, False]
    assert [allowance.take(100) for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("channel", ["control", "stdout", "stderr"])
def test_greeting(channel: Any) -> None:
    text = json.dumps({"rank": 3, "channel": channel, "secret": "s"}).encode()
    assert parse_greeting(text) == Greeting(3, channel, "s")


@pytest.mark.parametrize("text", [b"", b"{}", b'{"rank": -1, "channel": "control"}', b'{"rank": 0, "channel": "spam"}'])
def test_bad_greetings(text: bytes) -> None:
    with pytest.raises(MalformedEvent):
        parse_greeting(text)


def test_an_event_bears_the_rank_of_its_connection() -> None:
    event = parse_event(b'{"type": "metric", "step": 1, "values": {}, "rank": 9, "time": 5}', rank=2)
    assert event == {"type": "metric", "step": 1, "values": {}, "rank": 2, "time": 5.0}


def test_last_words() -> None:
    assert parse_last_word(TextLine(b'{"type": "done"}'), rank=0) == Done()
    assert parse_last_word(TextLine(b'{"type": "terminated", "time": 4.5}'), rank=0) == Terminated(4.5)
    error = b'{"type": "error", "error": "E", "message": "m", "traceback": "", "rank": 9, "time": 1}'
    word = parse_last_word(TextLine(error), rank=2)
    assert isinstance(word, dict)
    assert (word["error"], word["rank"]) == ("E", 2)
    for text in (b"", b"{}", b'{"type": "metric", "step": 1, "values": {}}', b'{"type": ["done"]}'):
        with pytest.raises(MalformedEvent):
            parse_last_word(TextLine(text), rank=0)


@given(st.binary(max_size=300))
def test_no_bytes_do_more_than_be_refused(text: bytes) -> None:
    try:
        event = parse_event(text, rank=0)
    except MalformedEvent:
        return
    assert event["rank"] == 0


@pytest.mark.parametrize("values", [b'{"loss": "low"}', b'{"loss": [1]}', b'{"loss": {}}'])
def test_the_values_of_a_metric_are_numbers(values: bytes) -> None:
    with pytest.raises(MalformedEvent, match="are numbers"):
        parse_event(b'{"type": "metric", "step": 1, "values": ' + values + b"}", rank=0)


def test_a_refusal_shows_only_the_beginning() -> None:
    with pytest.raises(MalformedEvent) as refusal:
        parse_event(b"x" * 100_000, rank=0)
    assert len(str(refusal.value)) < 1000


@given(st.sampled_from(["metric", "bound", "span", "log", "artifact", "progress", "error"]), st.data())
def test_an_event_that_lacks_a_field_is_refused_by_name(kind: str, data: st.DataObject) -> None:
    whole: dict[str, dict[str, Any]] = {
        "metric": {"step": 1, "values": {}},
        "bound": {"instance": 1, "verdict": "verified"},
        "span": {"name": "n", "start": 1, "end": 2.5},
        "log": {"stream": "stdout", "line": "x"},
        "artifact": {"name": "a", "media_type": "text/plain"},
        "progress": {"done": 1, "total": 2, "unit": "steps"},
        "error": {"error": "E", "message": "m", "traceback": "t"},
    }
    fields = whole[kind]
    assert parse_event(json.dumps({"type": kind, **fields}).encode(), 0)
    missing = data.draw(st.sampled_from(sorted(fields)))
    rest = {name: value for name, value in fields.items() if name != missing}
    with pytest.raises(MalformedEvent, match=f"'{missing}'"):
        parse_event(json.dumps({"type": kind, **rest}).encode(), 0)


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ({"type": "span", "name": "n", "start": 1, "end": 2, "detail": [1, 2]}, "'detail' of a span event is dict"),
        ({"type": "metric", "step": 1, "values": {"loss": "low"}}, "the 'values' of a metric event are numbers"),
        ({"type": "bound", "instance": 1, "verdict": "verified", "lower": 3}, "'lower' of a bound event is list"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(event: dict[str, Any], field: str) -> None:
    with pytest.raises(MalformedEvent, match=field):
        parse_event(json.dumps(event).encode(), 0)


def test_every_type_of_event_can_be_sent_but_state() -> None:
    """That is the service's own."""
    given = {
        "step": 1, "values": {}, "instance": 0, "verdict": "verified", "domains": 2, "open": 1, "seconds": 0.5,
        "name": "n", "start": 0.0, "end": 1, "stream": "stdout", "line": "", "media_type": "", "done": 1, "total": 2,
        "unit": "", "error": "", "message": "", "traceback": "",
    }  # fmt: skip
    for kind in EVENT_TYPES:
        line = json.dumps({"type": kind, **given}).encode()
        if kind == "state":
            with pytest.raises(MalformedEvent):
                parse_event(line, 0)
        else:
            event = parse_event(line, 3)
            assert (event["type"], event["rank"]) == (kind, 3)


_ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5), st.just("stdout"), st.just("x" * 300), st.lists(st.integers(), max_size=1),
)  # fmt: skip


@given(st.fixed_dictionaries({}, optional=dict.fromkeys((*Progress.model_fields, "time"), _ODD)))
def test_a_progress_that_is_taken_can_be_read_in_the_jobs_record(fields: dict[str, Any]) -> None:
    """Else one rank's event would keep everybody from listing jobs."""
    event = {"done": 1, "total": 2, "unit": "x", **fields, "type": "progress"}
    try:
        taken = parse_event(json.dumps(event).encode(), 0)
    except MalformedEvent:
        return
    assert Progress.model_validate({name: taken.get(name) for name in Progress.model_fields}).done == event["done"]
    assert len(json.dumps(event["unit"])) < 2000


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("line", "stream", "time", "id", "live"), _ODD)))
def test_a_line_that_is_taken_can_be_shown(fields: dict[str, Any]) -> None:
    event = {"line": "x", "stream": "stderr", **fields, "type": "log"}
    try:
        taken = parse_event(json.dumps(event).encode(), 0)
    except MalformedEvent:
        return
    assert event["line"] in _as_line(dict(taken)).text.replace(r"\n", "\n")


@pytest.mark.parametrize("moment", [1e300, -1e17, 2**64 - 1])
def test_what_is_no_time_is_now(moment: float) -> None:
    before = time.time()
    line = {"type": "log", "line": "x", "stream": "stdout", "time": moment}
    assert before <= parse_event(json.dumps(line).encode(), 0)["time"] <= time.time()
    span = {"type": "span", "name": "x", "start": moment, "end": 1.0}
    with pytest.raises(MalformedEvent, match="Unix seconds"):
        parse_event(json.dumps(span).encode(), 0)
