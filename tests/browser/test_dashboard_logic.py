"""The dashboard's pure modules, run in the browser that they are written for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from playwright.sync_api import Page

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0, "0"),
        (math.pi, "3.142"),
        (0.02345, "0.02345"),
        (1234567, "1,234,567"),
        (12345.678, "12,346"),
        (-1.5, "−1.500"),
        (0.0000123, "1.23e−5"),
        (5e12, "5.00e12"),
    ],
)
def test_numbers_keep_four_digits(run: Any, value: float | None, shown: str) -> None:
    assert run("format", "number", value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0423, "42 ms"), (4.25, "4.2 s"), (59.9, "59 s"), (61, "1 min 01 s"), (7384, "2 h 03 min"), (200000, "2 d 7 h")],
)
def test_durations(run: Any, seconds: float, shown: str) -> None:
    assert run("format", "duration", seconds).replace("\u202f", " ") == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(999, "999 B"), (1000, "1.0 kB"), (999_600, "1.0 MB"), (81_234_567, "81 MB")]
)
def test_sizes(run: Any, count: int, shown: str) -> None:
    assert run("format", "bytes", count).replace("\u202f", " ") == shown


def test_device_ranges(run: Any) -> None:
    assert run("format", "ranges", [6, 0, 1, 2, 8, 7]) == "0–2, 6–8"


def test_terminal_colours_are_removed(run: Any) -> None:
    assert run("format", "plain", "\x1b[31mred\x1b[0m \x1b]0;title\x07and\x00plain\ttab") == "red andplain\ttab"


def test_progress_says_the_phase_and_the_time_left(run: Any) -> None:
    told = {"done": 0, "total": 8, "unit": "instances"}
    assert run("state", "progressWords", told) == "0 of 8 instances"
    finer = {**told, "phase": "bounding hidden layers", "share": 0.25, "left_s": 75}
    assert (
        run("state", "progressWords", finer)
        == "0 of 8 instances, bounding hidden layers, about 1\u202fmin 15\u202fs left"
    )
    assert run("state", "fraction", {"progress": finer}) == 0.25
    assert run("state", "fraction", {"progress": {**told, "done": 2}}) == 0.25


def test_the_ranks_of_a_mesh_say_what_they_have(run: Any) -> None:
    parallel = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "tp": 2}
    placement = [
        {"host": "a", "pool": "cuda", "devices": [0, 1, 2, 3]},
        {"host": "b", "pool": "cuda", "devices": [0, 1, 2, 5]},
    ]
    rows = run("layout", "rows", parallel, placement, [[0, 2], [1, 3]], 5)
    assert [row["words"] for row in rows] == [
        ["stages 0, 2 of 4: blocks 0–1, 3", "shard 1 of 2"],
        ["stages 0, 2 of 4: blocks 0–1, 3", "shard 2 of 2"],
        ["stages 1, 3 of 4: blocks 2, 4", "shard 1 of 2"],
        ["stages 1, 3 of 4: blocks 2, 4", "shard 2 of 2"],
    ]
    cells = [cell for row in rows for cell in row["cells"]]
    assert [cell["rank"] for cell in cells] == list(range(8))
    assert cells[7]["device"] == "b cuda 5"
    assert len(run("layout", "meaning", "train", parallel)) == 3
    assert run("layout", "meaning", "verify", {"tp": 1, "dp_shard": 2}) == ["Shards see other instances."]


def test_attempts_are_read_off_the_changes_of_state(run: Any) -> None:
    def change(state: str, attempt: int, time: float, reason: str = "") -> dict[str, Any]:
        return {"type": "state", "state": state, "attempt": attempt, "time": time, "reason": reason}

    changes = [change("queued", 0, 0), change("starting", 1, 1), change("running", 1, 2)]
    changes += [change("queued", 1, 10, "the host was lost"), change("starting", 2, 12), change("running", 2, 13)]
    series = {"step": [1, 2, 3, 4], "time": [3.0, 9.0, 14.0, 15.0]}
    first, second = run("attempts", "attempts", changes, series)
    assert first == {
        "number": 1,
        "began": 1,
        "ended": 10,
        "how": "queued",
        "why": "the host was lost",
        "steps": [1, 2],
    }
    assert (second["ended"], second["how"], second["steps"]) == (None, "running", [3, 4])


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(12.0, "12 s"), (1.5, "1.50 s"), (0.0123456, "12.3 ms"), (0.0009999, "1 ms"), (85e-6, "85 µs")],
)
def test_short_times(run: Any, seconds: float, shown: str) -> None:
    assert run("spans", "precise", seconds).replace("\u202f", " ") == shown


def test_a_resumed_attempt_begins_its_step_anew(bench: Page) -> None:
    kept = bench.evaluate("""async () => {
        const { take } = await import("/static/lib/spans.js");
        const span = (name, rank, start) => ({ name, rank, start, end: start + 1, detail: { step: 7 } });
        const steps = new Map();
        const old = [span("data", 0, 1), span("data", 1, 1), span("optimizer", 0, 2)];
        for (const one of [...old, ...old, span("data", 0, 10), span("optimizer", 0, 11)]) take(steps, one);
        return [...steps.get(7).values()].map((one) => [one.name, one.rank, one.start]);
    }""")
    assert kept == [["data", 1, 1], ["data", 0, 10], ["optimizer", 0, 11]]


def test_of_cells_under_a_pointer_the_right_one_is_found(run: Any) -> None:
    cells = [{"start": 0, "end": 1}, {"start": 1.5, "end": 4}, {"start": 6, "end": 7}]
    places = {0.5: 0, 3.9: 1, 4.1: 1, 5.9: 2, 5.0: -1, 99.0: -1}
    assert {at: run("gantt", "cellAt", cells, at, 0.2) for at in places} == places


def test_the_stream_may_repeat_the_snapshot_but_not_swallow_equal_lines(bench: Page) -> None:
    kept = bench.evaluate("""async () => {
        const { LogStore, fromEvent } = await import("/static/lib/log.js");
        const line = (text, time) => fromEvent({ type: "log", time, rank: 0, stream: "stdout", line: text });
        const store = new LogStore([line("a", 1), line("same", 2), line("same", 2)]);
        for (const one of [line("same", 2), line("same", 2), line("b", 3), line("b", 3)]) store.add(one);
        return store.lines.map((one) => one.text);
    }""")
    assert kept == ["a", "same", "same", "b", "b"]


def test_a_spec_reads_back_as_the_same_yaml(bench: Page) -> None:
    spec = {
        "kind": "train",
        "name": 'a: "b" # c\n- d',
        "labels": {"x/y": "yes", "empty": "", "number": ".5", "odd": ".NaN", "lines": "a\u2028b\x85c\ufffe\uffff"},
        "model": {"hidden": [64, 64], "nothing": None, "list": [{"a": 1, "b": [True, {}]}, [], "on"]},
        "lr": 1e-3,
        "long": [f"item {index}" for index in range(20)],
    }
    text = bench.evaluate(
        'async (spec) => { const { lines, text } = await import("/static/lib/spec.js"); return text(lines(spec)); }',
        spec,
    )
    assert yaml.safe_load(text) == spec


def test_a_phase_ends_the_one_before_and_is_taken_once(run: Any) -> None:
    """Those of other ranks say nothing of the job."""
    told = {"type": "phase", "time": 12.5, "rank": 0, "name": "importing"}
    job = {"phases": [{"name": "starting", "began_at": "1970-01-01T00:00:12Z", "seconds": None}]}
    once = run("state", "reduce", job, told)
    assert [(phase["name"], phase["seconds"]) for phase in once["phases"]] == [("starting", 0.5), ("importing", None)]
    assert run("state", "reduce", once, told) == once
    assert run("state", "reduce", once, {**told, "rank": 1, "time": 13.0}) == once


def test_an_old_attempts_state_does_not_come_back(run: Any) -> None:
    job = {"state": "running", "attempt": 2, "reason": None}
    late = {"type": "state", "time": 1.0, "rank": None, "state": "queued", "attempt": 1}
    assert run("state", "reduce", job, late)["state"] == "running"


@pytest.mark.parametrize(
    ("worth", "shown"),
    [
        ({"worth_it": True, "noisy": False, "break_even_steps": 1200}, "pays after 1,200 steps"),
        ({"worth_it": True, "noisy": True, "break_even_steps": 12}, "pays after 12 steps (noisy timing)"),
        (
            {"worth_it": False, "noisy": True, "break_even_steps": None},
            "too noisy to tell whether it pays",
        ),
        ({"worth_it": False, "noisy": False, "break_even_steps": None}, "never pays"),
    ],
)
def test_a_noisy_race_is_called_neither_won_nor_lost(run: Any, worth: dict[str, Any], shown: str) -> None:
    assert run("report", "payoff", worth) == shown


def test_sentences_of_a_report_do_not_repeat_its_cards(run: Any) -> None:
    stopped = "Inference must not be compiled: inductor raises an error (no)."
    told = ["Training may be compiled with inductor: all 3 rungs passed.", "It is not worth it: a step takes 1.2×."]
    assert run("report", "more", [*told, stopped]) == [stopped]


def test_of_cells_that_share_a_pixel_one_is_drawn(bench: Page) -> None:
    cells = bench.evaluate("""async () => {
      const { drawn } = await import("/static/lib/gantt.js");
      const cells = Array.from({ length: 5000 }, (_, index) => ({ start: index, end: index + 1 }));
      return drawn(cells, 0, 5000, 800).length;
    }""")
    assert 400 <= cells <= 1600


def test_a_label_of_a_vertical_axis_is_not_cut(bench: Page) -> None:
    widths = bench.evaluate("""async () => {
      const { frame } = await import("/static/ui/canvas.js");
      const context = document.createElement("canvas").getContext("2d"), given = [];
      context.fillText = (text, x, y, most = Infinity) => given.push(most <= x);
      const scale = { at: (value) => value, domain: [0, 1] };
      const area = { width: 99, height: 99, left: 20, right: 90, top: 0, bottom: 90 };
      frame(context, area, { scale, ticks: [] }, { scale, ticks: [0.002995], label: String });
      return given;
    }""")
    assert widths == [True]


def test_of_several_changes_of_what_is_seen_the_last_one_holds(bench: Page) -> None:
    is_visible = bench.evaluate("""async () => {
      const { Surface } = await import("/static/ui/canvas.js");
      const theirs = window.IntersectionObserver;
      let told = () => {};
      window.IntersectionObserver = class { constructor(tell) { told = tell; } observe() {} };
      const surface = new Surface(document.createElement("canvas"), () => {});
      window.IntersectionObserver = theirs;
      told([{ isIntersecting: false }, { isIntersecting: true }]);
      return surface.visible;
    }""")
    assert is_visible is True


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (None, ""),
        ({"place": None, "start": None}, ""),
        ({"place": 1, "start": {"at": "1970-01-01T00:00:00Z", "rests_on": []}}, "next in the queue; it fits now"),
        (
            {"place": 7, "start": {"at": "1970-01-01T00:10:00Z", "rests_on": ["progress", "limits"]}},
            "number 7 in the queue; may start in 10 min 00 s, by the progress of running jobs and time limits",
        ),
    ],
)
def test_a_waiting_jobs_turn(run: Any, line: dict[str, Any] | None, shown: str) -> None:
    assert run("queue", "turn", line, 0) == shown


def test_a_log_breaks_at_the_last_traceback_of_the_rank_that_failed(run: Any) -> None:
    begin = "Traceback (most recent call last):"
    texts = [(0, "a"), (1, begin), (1, "  File"), (0, "b"), (1, "ValueError: no"), (0, begin), (0, "  File")]
    lines = [{"key": str(index), "time": index, "rank": rank, "text": text} for index, (rank, text) in enumerate(texts)]
    assert run("log", "breaking", lines, 1)["text"] == "ValueError: no"
    assert run("log", "breaking", lines)["key"] == "5", "its end is missing"
    assert run("log", "breaking", lines, 7)["key"] == "5"
    assert run("log", "breaking", lines[:1]) is None


def test_only_square_inputs_are_pictures(bench: Page) -> None:
    drawn = """async (values) => {
      const found = (await import("/static/lib/picture.js")).picture(values);
      return found && [found.side, ...found.pixels];
    }"""
    grey = bench.evaluate(drawn, [0.0] * 63 + [1.0])
    assert grey[0] == 8
    assert grey[1:5] == [0, 0, 0, 255]
    assert grey[-4:] == [255, 255, 255, 255]
    colour = bench.evaluate(drawn, [1.0] * 36 + [0.0] * 72)
    assert colour[0] == 6
    assert colour[1:5] == [255, 0, 0, 255]
    wide = bench.evaluate(drawn, [-2.0] + [2.0] * 63)
    assert wide[1:9] == [0, 0, 0, 255, 255, 255, 255, 255]
    for count in (4, 63, 65):
        assert bench.evaluate(drawn, [0.5] * count) is None


def test_pictures_have_any_size(run: Any) -> None:
    count = 3 * 224 * 224
    found = run("picture", "apart", [0.0] * count, [0.25] * count)
    assert (found["picture"]["side"], found["most"]) == (224, 0.25)
    assert found["norm"] == pytest.approx(0.25 * count**0.5)


def test_a_job_that_would_fail_again_has_nothing_to_retry(run: Any) -> None:
    unlucky = {"id": "a", "state": "failed", "error": {"message": "lost"}}
    impossible = {"id": "b", "state": "failed", "error": {"message": "no such layer", "final": True}}
    assert [run("state", "canRetry", job) for job in (unlucky, impossible)] == [True, False]
    (left,) = run("selection", "hopeless", {"name": "Retry"}, [unlucky, impossible])
    assert (left["job"]["id"], left["why"]) == ("b", "It would fail again: no such layer")
    told = run("selection", "report", {"done": "queued again"}, [left], 3)
    assert told["heading"] == "2 jobs queued again, 1 not"
