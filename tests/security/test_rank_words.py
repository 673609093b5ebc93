"""What a rank writes, whatever it writes: no traceback, no limit passed, and nobody else is blamed.

One generator for every file, word and field that a rank writes; a few cases by default, 2,000 in the long run.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import examples

from api.routes.events import EventItem
from api.routes.logs import _as_line
from api.routes.metrics import _thin, collect
from api.routes.timeline import _by_step, _rows
from api.routes.tree import _rows as _bounds
from api.routes.tree import _searches
from service.jobs.events import (
    EVENT_TYPES,
    LONGEST_EVENT,
    LONGEST_MESSAGE,
    LONGEST_WORDS,
    RECORDED_ONLY,
    EventReader,
    MalformedEvent,
    OddWord,
    event_key,
    newest_logged,
    parse_event,
    rank_file,
    recorded,
)
from service.jobs.events.curves import CurveKeeper
from service.jobs.records import ListedJob, Progress
from service.jobs.store.attempts import _phases, _progress
from workers.event_protocol import Done, Terminated, TextLine, parse_greeting, parse_last_word
from workers.supervisor.attempt_folder import read_result
from workers.supervisor.group import exit_codes_in
from workers.supervisor.outcome import Evidence, judge

EVENTS: list[dict[str, Any]] = [
    {"type": "metric", "step": 1, "values": {"loss": 0.5}},
    {"type": "search", "instance": 0, "domains": 2, "open": 1, "bound": 0.1, "seconds": 1.0},
    {"type": "tree", "instance": 0, "domains": 2, "seconds": 1.0, "ranks": 1, "searches": []},
    {"type": "span", "name": "data", "start": 1.0, "end": 2.0, "detail": {"step": 1}},
    {"type": "log", "stream": "stdout", "line": "hello"},
    {"type": "artifact", "name": "a/b", "media_type": "text/plain"},
    {"type": "progress", "done": 1, "total": 2, "unit": "steps", "share": 0.5, "phase": "x", "left_s": 1.0},
    {"type": "phase", "name": "working"},
    {"type": "error", "error": "ValueError", "message": "no", "traceback": "…"},
    {"type": "state", "state": "succeeded", "attempt": 9},
    {"type": "bound", "instance": 0, "verdict": "verified", "lower": [0.0], "upper": [1.0], "margin": 1.0,
     "method": "ibp", "seconds": 1.0, "domains": 1, "counterexample": None},
]  # fmt: skip
WORDS = [*EVENTS, {"type": "done"}, {"type": "terminated"}, {"rank": 0, "channel": "control", "secret": "s"}]

numbers = st.one_of(
    st.integers(), st.sampled_from([2**63, 2**64, -(2**63), 10**30, 1e308, -1e308, 5e-324]), st.floats(), st.booleans()
)
texts = st.one_of(
    st.text(max_size=20), st.sampled_from(["x" * 300_000, "../..", "a\r\nb: c", "\u202e", "\0", "𝄞", "service"])
)
values = st.recursive(
    st.none() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | texts, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def odd_words(draw: st.DrawFn) -> bytes:
    """JSON that is almost what a rank says."""
    word = dict(draw(st.sampled_from(WORDS)))
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from([*word, "time", "rank", "extra", "completed"]))
        if draw(st.booleans()):
            word.pop(name, None)
        else:
            word[name] = draw(values)
    return json.dumps(word).encode()  # also NaN, Infinity, halves of characters, numbers of any length


raw = st.one_of(
    odd_words(),
    odd_words(),
    values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
    st.tuples(st.sampled_from([b"[", b'{"a":']), st.sampled_from([65, 500, 100_000])).map(lambda d: d[0] * d[1]),
    st.integers(60, 300).map(lambda depth: b'{"type":"span","name":"x","start":1,"end":2,"detail":'
                             + b'{"a":' * depth + b"1" + b"}" * depth + b"}"),
    st.tuples(odd_words(), st.integers(0, 200), st.binary(max_size=3)).map(
        lambda d: d[0][: d[1]] + d[2] + d[0][d[1] :]
    ),
)  # fmt: skip
hard = settings(max_examples=examples(40, 2000), deadline=None, suppress_health_check=list(HealthCheck))


def tried(check: Callable[[bytes], None], given_by: st.SearchStrategy[bytes] = raw) -> None:
    hard(given(given_by)(check))()


def shown(event: dict[str, Any]) -> None:
    """Every reader of an event that was taken takes it."""
    assert len(orjson.dumps(event)) <= 2 * LONGEST_EVENT
    event_key(event)
    if event["type"] not in RECORDED_ONLY:
        EventItem.model_validate({**event, "id": "1-0", "job": "job_1"}).model_dump_json()
    match event["type"]:
        case "metric":
            for points in collect([event], None).values():
                _thin(points, 100).model_dump_json()
            curves = CurveKeeper()
            curves.take(event)
            with tempfile.TemporaryDirectory() as folder:
                curves.write(Path(folder), 0, {})
        case "progress":
            progress = Progress.model_validate_json(_progress(event))  # type: ignore[arg-type]
            assert 0 <= (progress.share or 0) <= 1
            assert (progress.left_s or 0) >= 0
        case "phase":
            assert len(event["name"]) <= LONGEST_WORDS
            _phases([event])  # type: ignore[list-item]
        case "log":
            assert event["stream"] != "service"
            assert _as_line(event).text.count("\n") == 1
        case "span":
            _rows([event])
            _by_step([event])
        case "tree":
            _searches(event)
        case "bound":
            list(_bounds(event))


def test_events() -> None:
    def check(text: bytes) -> None:
        try:
            event: Any = parse_event(text, 3)
        except MalformedEvent:
            return
        assert event["type"] in {*EVENT_TYPES, *RECORDED_ONLY} - {"state"}
        assert event["rank"] == 3
        shown(event)

    tried(check)


def test_words_to_the_supervisor() -> None:
    def check(text: bytes) -> None:
        with contextlib.suppress(MalformedEvent):
            parse_greeting(text)
        try:
            word = parse_last_word(TextLine(text), 3)
        except MalformedEvent:
            return
        if isinstance(word, Done | Terminated):
            return
        outcome = judge(Evidence("rank_failed", 1, errors=[word], ranks=1))
        assert (outcome.status, outcome.error is not None and outcome.error.rank) == ("failed", 3)
        assert outcome.error is not None
        assert len(outcome.error.type) <= LONGEST_WORDS + 1
        assert len(outcome.error.message) <= LONGEST_MESSAGE + 1

    tried(check)


def test_results_and_exit_codes(tmp_path: Path) -> None:
    def check(text: bytes) -> None:
        for name in ("result.json", "exit-codes.json"):
            (tmp_path / name).write_bytes(text)
        result, odd = None, ""
        try:
            result = read_result(tmp_path)
        except OddWord as error:
            odd = str(error)
        codes = exit_codes_in(tmp_path)
        assert all(rank >= 0 and -65 < code < 256 for rank, code in codes.items())
        outcome = judge(Evidence("exited", 0, codes, ranks=1, done=1, leads=True, result=result, odd_result=odd))
        assert outcome.status in ("succeeded", "failed"), "neither lost nor interrupted: the host did nothing wrong"
        if outcome.result is not None:
            fields = {"id": "job_1", "kind": "train", "name": "", "labels": {}, "owner": "a", "state": "succeeded",
                      "attempt": 1, "priority": 0, "created_at": 0}  # fmt: skip
            ListedJob.model_validate({**fields, "result": outcome.result}).model_dump_json()

    done = odd_words().map(lambda text: text.replace(b'"type"', b'"completed":{"done":1,"total":1,"unit":"x"},"type"'))
    tried(check, raw | done)


def test_files_of_events(tmp_path: Path) -> None:
    path = rank_file(tmp_path, 3)
    types = {*EVENT_TYPES, *RECORDED_ONLY}

    def check(text: bytes) -> None:
        path.write_bytes(text)
        for event in [*recorded(tmp_path, types), *newest_logged(tmp_path)]:
            if "is not read" not in event.get("line", ""):
                shown(event)
        reader = EventReader(path, 3)
        while reader.read() or reader.has_more:
            pass
        reader.close()

    lines = st.lists(raw, max_size=5).map(b"\n".join)
    tried(check, lines | lines.map(lambda text: text + b"\n"))
