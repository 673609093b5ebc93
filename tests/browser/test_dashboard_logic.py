"""The dashboard's pure modules, run in the browser that they are written for."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from playwright.sync_api import Browser, Page, Route

from service.jobs.kinds.registry import KINDS, spec_adapter

pytestmark = pytest.mark.browser
STATIC = Path(__file__).parents[2] / "api" / "dashboard" / "static"


@pytest.fixture(scope="module")
def bench(browser: Browser) -> Iterator[Page]:
    """A page of an origin that has the modules as they lie in the sources, and no service behind it."""

    def answer(route: Route) -> None:
        path = STATIC.parent / urlsplit(route.request.url).path.lstrip("/")
        if path.is_file():
            route.fulfill(path=path, content_type="text/javascript")
        else:
            route.fulfill(body="<!doctype html>", content_type="text/html")

    with contextlib.closing(browser.new_context(base_url="http://modules.test")) as context:
        context.route("**/*", answer)
        page = context.new_page()
        page.goto("/")
        yield page


@pytest.fixture(scope="module")
def run(bench: Page) -> Any:
    """Calls an exported function of a module below ``static/lib`` with JSON arguments."""

    def call(module: str, function: str, *arguments: Any) -> Any:
        return bench.evaluate(
            "async ([path, name, given]) => (await import(path))[name](...given)",
            [f"/static/lib/{module}.js", function, list(arguments)],
        )

    return call


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


def test_decimation_keeps_every_extreme(run: Any) -> None:
    generator = random.Random(5)
    x = list(range(4_000))
    y = [generator.gauss(0, 1) for _ in x]
    y[1_777], y[3_131] = 50.0, -50.0
    kept = run("decimate", "decimate", x, y, 0, 3_999, 100)
    assert len(kept["x"]) <= 4 * 101
    assert kept["x"] == sorted(kept["x"])
    assert max(kept["y"]) == 50.0
    assert min(kept["y"]) == -50.0
    assert (kept["x"][0], kept["x"][-1]) == (0, 3_999)


def test_decimation_looks_only_at_the_view(run: Any) -> None:
    x = list(range(1000))
    kept = run("decimate", "decimate", x, x, 400, 420, 100)
    assert (kept["x"][0], kept["x"][-1]) == (399, 421)


def test_a_mean_is_taken_where_all_curves_are(run: Any) -> None:
    lines = [{"x": [0, 1, 2, 3], "y": [0, 1, 2, 3]}, {"x": [1, 3, 5], "y": [3, 7, 9]}]
    assert run("seeds", "mean", lines) == {"x": [1, 2, 3], "y": [2, 3.5, 5], "low": [1, 2, 3], "high": [3, 5, 7]}


@pytest.mark.parametrize(("target", "index"), [(-5, 0), (4.9, 1), (7.6, 2), (99, 2)])
def test_nearest_point(run: Any, target: float, index: int) -> None:
    assert run("decimate", "nearest", [0, 5, 10], target) == index


def test_ticks_are_round_and_at_least_two(run: Any) -> None:
    assert run("scales", "linearTicks", 0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert len(run("scales", "linearTicks", 0.36, 0.44, 3)) >= 2
    assert run("scales", "logTicks", 0.001, 10, 4) == [0.001, 0.01, 0.1, 1, 10]


def test_a_resumed_attempt_replaces_what_came_after_its_first_step(bench: Page) -> None:
    series = bench.evaluate("""async () => {
        const { append } = await import("/static/lib/series.js");
        const series = { step: [], time: [], value: [] };
        const points = [[1, 9], [2, 8], [3, 7], [4, 6], [3, 70], [4, 60], [5, 50]];
        for (const [step, value] of points) append(series, step, step, value);
        return series;
    }""")
    assert series["step"] == [1, 2, 3, 4, 5]
    assert series["value"] == [9, 8, 70, 60, 50]


def test_a_long_series_is_thinned_but_keeps_its_extremes(bench: Page) -> None:
    found = bench.evaluate("""async () => {
        const { append, CAP } = await import("/static/lib/series.js");
        const series = { step: [], time: [], value: [] };
        for (let step = 0; step < CAP * 3; step += 1) {
          append(series, step, step / 10, step === 12345 ? 99 : Math.sin(step));
        }
        const top = Math.max(...series.value);
        return { length: series.step.length, top, cap: CAP, time: series.time[5] * 10, step: series.step[5] };
    }""")
    assert found["length"] <= found["cap"]
    assert found["top"] == 99
    assert found["time"] == pytest.approx(found["step"])


def test_metrics_are_sorted_into_panels(run: Any) -> None:
    panels = run("series", "panels", ["zeta", "lr", "eval_loss", "loss", "eval_accuracy"])
    assert [panel["names"] for panel in panels] == [["loss", "eval_loss"], ["eval_accuracy"], ["lr"], ["zeta"]]


def test_a8_progress_says_the_phase_and_the_time_left(run: Any) -> None:
    told = {"done": 0, "total": 8, "unit": "instances"}
    assert run("state", "progressWords", told) == "0 of 8 instances"
    finer = {**told, "phase": "bounding hidden layers", "share": 0.25, "left_s": 75}
    assert (
        run("state", "progressWords", finer)
        == "0 of 8 instances, bounding hidden layers, about 1\u202fmin 15\u202fs left"
    )
    assert run("state", "fraction", {"progress": finer}) == 0.25
    assert run("state", "fraction", {"progress": {**told, "done": 2}}) == 0.25


def test_shares_of_time_and_accuracies_have_a_panel_each(run: Any) -> None:
    names = ["mfu", "bubble_fraction", "eval_certified_accuracy", "memory_gib", "data_wait_fraction", "eval_accuracy"]
    panels = run("series", "panels", names)
    assert [(panel["title"], panel["unit"], panel["names"]) for panel in panels] == [
        ("Accuracy", "%", ["eval_accuracy", "eval_certified_accuracy"]),
        ("Time spent waiting", "%", ["bubble_fraction", "data_wait_fraction"]),
        ("Model FLOPs utilisation", "%", ["mfu"]),
        ("Peak memory", "GiB per device", ["memory_gib"]),
    ]
    assert run("scales", "percentLabel", 0.125) == "12.5\u202f%"


def test_metrics_of_devices_have_a_panel_for_all_ranks(run: Any) -> None:
    names = [f"device_busy.{rank}" for rank in (10, 2, 0)] + ["device_power_w.0"]
    panels = run("series", "panels", names)
    assert [(panel["title"], panel["unit"], panel["names"]) for panel in panels] == [
        ("Utilisation", "%", ["device_busy.0", "device_busy.2", "device_busy.10"]),
        ("Power", "W by rank", ["device_power_w.0"]),
    ]


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


def test_the_same_question_is_told_from_others(run: Any) -> None:
    def asked(identity: str, method: str, eps: float = 0.1, **fields: Any) -> dict[str, Any]:
        spec = {"kind": "verify", "model": {"job": "m"}, "property": {"eps": eps}, "method": method}
        return job(identity, spec, state="succeeded", **fields)

    others = [asked("1", "crown"), asked("2", "ibp"), asked("3", "ibp"), asked("4", "crown-ibp", 0.2), asked("5", "x")]
    others[4]["state"] = "failed"
    assert [one["id"] for one in run("methods", "sameQuestion", others[0], others)] == ["1", "2"]


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
        "labels": {"x/y": "yes", "empty": ""},
        "model": {"hidden": [64, 64], "nothing": None, "list": [{"a": 1, "b": [True, {}]}, [], "on"]},
        "lr": 1e-3,
        "long": [f"item {index}" for index in range(20)],
    }
    text = bench.evaluate(
        'async (spec) => { const { lines, text } = await import("/static/lib/spec.js"); return text(lines(spec)); }',
        spec,
    )
    assert yaml.safe_load(text) == spec


def test_gathered_margins_keep_the_worst_instance(run: Any) -> None:
    rows = [{"instance": index, "verdict": "verified", "margin": 1.0, "lower": [], "upper": []} for index in range(300)]
    rows[217] |= {"margin": -3.0, "verdict": "falsified"}
    columns = run("bounds", "gather", rows, 30)
    assert len(columns) <= 30
    assert min((column["least"] for column in columns), key=lambda row: row["margin"])["instance"] == 217


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


@pytest.mark.parametrize("top", [0.9, 3, 12, 301, 4000, 10**7])
def test_labels_of_a_logarithmic_axis_stand_apart(bench: Page, top: float) -> None:
    ticks, places = bench.evaluate(
        """async (top) => {
        const { apart, footed, logTicks, logarithmic } = await import("/static/lib/scales.js");
        const scale = logarithmic(footed([0.7, top]), [136, 8]);
        const ticks = apart([0, ...logTicks(...scale.domain, 3)], scale, 13);
        return [ticks, ticks.map(scale.at)];
    }""",
        top,
    )
    assert len(ticks) >= 3
    assert (ticks[0], places[0]) == (0, 136)
    assert all(below - above >= 13 for below, above in pairwise(places))


def test_by_margin_a_row_without_one_is_first_unless_it_is_verified(run: Any) -> None:
    rows = [("verified", 0.5), ("verified", None), ("falsified", None), ("unknown", -2.0)]
    given = [{"instance": at, "verdict": verdict, "margin": margin} for at, (verdict, margin) in enumerate(rows)]
    assert [row["instance"] for row in run("bounds", "ordered", given, "margin")] == [2, 3, 0, 1]


def test_of_cells_that_share_a_pixel_one_is_drawn(bench: Page) -> None:
    cells = bench.evaluate("""async () => {
      const { drawn } = await import("/static/lib/gantt.js");
      const cells = Array.from({ length: 5000 }, (_, index) => ({ start: index, end: index + 1 }));
      return drawn(cells, 0, 5000, 800).length;
    }""")
    assert 400 <= cells <= 1600


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


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ({"state": "failed", "error": {"type": "ValueError", "message": "no"}}, "ValueError: no"),
        ({"state": "queued", "reason": "waits for devices"}, "waits for devices"),
        ({"state": "succeeded", "result": {"loss": 0.25}}, "loss 0.2500"),
        ({"state": "succeeded", "result": {"loss": 1, "eval_accuracy": 0.5}}, "accuracy 50.0 %"),
        ({"state": "succeeded", "result": {"verdicts": {"verified": 3, "unknown": 2}, "instances": 5}},
         "verified 3 of 5, 2 unknown"),
        ({"state": "succeeded", "result": {"gate": {"train": "inductor"}}}, "allows inductor (train)"),
        ({"state": "succeeded", "result": {"gate": {"train": "eager", "inference": "eager"}}}, "allows eager"),
        ({"state": "succeeded", "result": {"gate": {"train": None}}}, "allows no compilation"),
        ({"state": "succeeded", "result": None}, ""),
        ({"state": "running", "children": {"total": 9, "succeeded": 4, "failed": 1, "best": {"value": 0.5}}},
         "4 of 9 succeeded, 1 failed, best 0.5000"),
    ],
)  # fmt: skip
def test_the_headline_of_a_job(run: Any, job: dict[str, Any], told: str) -> None:
    assert run("headline", "headline", job).replace("\u202f", " ") == told


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("", "/v1/jobs?sweep=none&order=active&limit=5"),
        (
            "q=a+b&state=failed&state=queued&x=1",
            "/v1/jobs?q=a+b&sweep=none&state=failed&state=queued&order=active&limit=5",
        ),
        ("sweep=all&order=newest&cursor=c", "/v1/jobs?order=newest&limit=5&cursor=c"),
    ],
)
def test_the_address_says_what_is_listed(run: Any, address: str, path: str) -> None:
    assert run("filters", "listPath", address, 5) == path


def test_states_are_chosen_one_by_one(run: Any) -> None:
    assert run("filters", "toggled", "q=a&cursor=c", "failed") == "q=a&state=failed"
    assert run("filters", "toggled", "state=failed", "queued") == "state=failed&state=queued"
    assert run("filters", "toggled", "state=failed&state=queued", "failed") == "state=queued"
    assert run("filters", "toggled", "state=failed&q=a", "") == "q=a"


def test_the_best_of_a_metric_is_what_is_better_of_it(run: Any) -> None:
    assert run("series", "best", "eval_loss", [3, 1, 2]) == 1
    assert run("series", "best", "eval_accuracy", [0.1, 0.9, 0.9]) == 1
    assert run("series", "best", "lr", [1, 2]) is None
    assert run("series", "best", "loss", []) is None


def test_a_log_breaks_at_the_last_traceback_of_the_rank_that_failed(run: Any) -> None:
    begin = "Traceback (most recent call last):"
    texts = [(0, "a"), (1, begin), (1, "ValueError"), (0, begin), (0, "end")]
    lines = [{"key": str(index), "time": index, "rank": rank, "text": text} for index, (rank, text) in enumerate(texts)]
    assert run("log", "breaking", lines, 1)["key"] == "1"
    assert run("log", "breaking", lines)["key"] == "3"
    assert run("log", "breaking", lines, 7)["key"] == "3"
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


def test_a_click_on_a_heading_sorts_then_turns_round_then_lets_go(run: Any) -> None:
    once = run("columns", "withSort", "q=a&cursor=c", "result.loss")
    assert once == "q=a&sort=-result.loss"
    twice = run("columns", "withSort", once, "result.loss")
    assert twice == "q=a&sort=result.loss"
    assert run("columns", "withSort", twice, "result.loss") == "q=a"
    assert run("columns", "withSort", once, "owner") == "q=a&sort=owner"
    assert run("columns", "sortOf", "sort=constructor") is None


def test_columns_are_added_before_what_tells_when_and_taken_away(run: Any) -> None:
    shown = run("columns", "columnsOf", "")
    added = run("columns", "withColumn", "", "result.loss")
    columns = run("columns", "columnsOf", added)
    assert sorted(columns) == sorted([*shown, "result.loss"])
    assert columns.index("result.loss") < columns.index("duration")
    assert run("columns", "withColumn", added, "result.loss") == ""
    assert run("columns", "columnsOf", "columns=owner,toString,owner") == ["owner"]


def job(identity: str, spec: dict[str, Any], result: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"id": identity, "kind": spec["kind"], "name": "", "spec": spec, "result": result, **fields}


def test_jobs_differ_in_fields_that_others_of_their_kind_have(run: Any) -> None:
    train = {"kind": "train", "name": "a", "steps": 10, "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}}
    jobs = [
        job("1", train, {"loss": 0.5, "layers": {"0": {"norm": {"l2": 3}}}, "shape": [1, 2]}),
        job(
            "2", {**train, "name": "b", "optimizer": {"lr": 0.2, "betas": [0.9, 0.99]}}, {"loss": None, "device": "cpu"}
        ),
        job("3", {"kind": "verify", "name": "c", "method": "crown"}),
    ]
    columns = run("compare", "compared", jobs)["columns"]
    assert columns == [
        {"path": "kind", "of": "spec", "numeric": False},
        {"path": "optimizer.lr", "of": "spec", "numeric": True},
        {"path": "optimizer.betas", "of": "spec", "numeric": False},
        {"path": "result.loss", "of": "result", "numeric": True},
        {"path": "result.device", "of": "result", "numeric": False},
    ]


def test_what_all_results_have_alike_is_no_column(run: Any) -> None:
    jobs = [
        job(
            name,
            {"kind": "train"},
            {"loss": loss, "steps": 40, "completed": {"done": 40, "total": 40, "unit": "steps"}},
        )
        for name, loss in (("1", 0.5), ("2", 0.4))
    ]
    found = run("compare", "compared", jobs)
    assert [column["path"] for column in found["columns"]] == ["result.loss"]
    found = run("compare", "compared", jobs[:1])
    assert [column["path"] for column in found["columns"]] == ["result.loss", "result.steps"]


def test_what_a_result_repeats_of_the_spec_is_one_column(run: Any) -> None:
    jobs = [
        job(method, {"kind": "verify", "method": method}, {"method": method, "rows": rows, "stopped": False})
        for method, rows in (("ibp", 1), ("crown", 2))
    ]
    found = run("compare", "compared", jobs)
    assert [column["path"] for column in found["columns"]] == ["method", "result.rows"]
    jobs[0]["result"]["method"] = "ibp, rigorous"
    found = run("compare", "compared", jobs)
    assert [column["path"] for column in found["columns"]] == ["method", "result.method", "result.rows"]


@pytest.mark.parametrize(
    ("value", "text"),
    [("c1" * 32, "c1c1c1…c1c1"), ("c1" * 8, "c1" * 8), (1234.5, "1,235"), (None, "–"), ([1], "[1]")],
)
def test_of_a_hash_both_ends_are_shown(run: Any, value: Any, text: str) -> None:
    assert run("compare", "shown", value) == text


def test_names_beside_points_lie_over_nothing(run: Any) -> None:
    area = {"left": 0, "right": 400, "top": 0, "bottom": 300}
    close = [{"x": 100, "y": 100}, {"x": 130, "y": 100}, {"x": 390, "y": 200}]
    first, second, third = run("labels", "places", close, ["one", "another", "at the edge"], area)
    assert (first["anchor"], second["anchor"], third["anchor"]) == ("end", "start", "end")
    crowd = [{"x": 200, "y": 150 + index / 10} for index in range(9)]
    placed = run("labels", "places", crowd, ["a long name"] * 9, area)
    assert 0 < sum(each is not None for each in placed) < 9


def test_jobs_of_one_name_are_told_apart(run: Any) -> None:
    spec = {"kind": "train"}
    jobs = [
        job("job_00001", spec, name="same"),
        job("job_00002", spec, name="same"),
        job("job_00003", spec, sweep="job_0", parameters={"optimizer.lr": 0.1}),
    ]
    assert run("compare", "names", jobs) == ["same (00001)", "same (00002)", "lr=0.1"]


def test_swept_fields_are_named_by_what_tells_them_apart(run: Any) -> None:
    parameters = {"model.hidden.0": 16, "optimizer.lr": 0.1, "a.eps": 1, "b.eps": 2}
    one = job("job_00003", {"kind": "train"}, sweep="job_0", parameters=parameters)
    assert run("compare", "swept", one) == "hidden.0=16, lr=0.1, a.eps=1, b.eps=2"
    assert run("compare", "swept", one | {"sweep": None}) == ""


def test_what_is_missing_is_last_in_either_order(run: Any) -> None:
    values = [None, 10, 9.5, -1]
    assert run("compare", "order", values, False) == [3, 2, 1, 0]
    assert run("compare", "order", values, True) == [1, 2, 3, 0]
    assert run("compare", "order", ["b10", "b9", "a"], False) == [2, 1, 0]


def test_a_saved_table_is_csv_without_formulas(run: Any) -> None:
    head, rows = ["name", "value"], [['a "b", c', 1.5], ["=1+1", None], ["two\nlines", [1, 2]]]
    read = list(csv.reader(io.StringIO(run("compare", "csv", head, rows), newline="")))
    assert read == [head, ['a "b", c', "1.5"], ["'=1+1", ""], ["two\nlines", "[1,2]"]]


def test_smoothing_begins_at_the_first_value_and_keeps_constants(run: Any) -> None:
    assert run("series", "smoothed", [4.0, 4.0, 4.0], 0.9) == pytest.approx([4.0, 4.0, 4.0])
    assert run("series", "smoothed", [1.0, 3.0], 0.5) == pytest.approx([1.0, (0.5 + 3.0) / 1.5])


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    return {kind: KINDS.declaration(kind).config.model_json_schema() for kind in KINDS.provided}


def test_every_field_of_a_spec_is_in_its_form(run: Any, schemas: dict[str, Any]) -> None:
    for kind, schema in schemas.items():
        fields = {field["name"]: field for field in run("schema", "fieldsOf", schema)}
        assert fields.keys() == schema["properties"].keys(), kind
        assert {name for name, field in fields.items() if field["required"]} == set(schema.get("required", ()))
    train = {field["name"]: field for field in run("schema", "fieldsOf", schemas["train"])}
    assert {
        name: train[name]["type"] for name in ("steps", "after", "labels", "preemptible", "device", "data", "batch")
    } == {
        "steps": "number",
        "after": "list",
        "labels": "map",
        "preemptible": "switch",
        "device": "choice",
        "data": "union",
        "batch": "group",
    }
    assert [field["path"] for field in train["batch"]["fields"]] == ["batch.global", "batch.micro"]


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ({"family": "mlp"}, "mlp"),
        ({"family": "transformer", "safetensors": "file_0"}, "transformer from safetensors"),
        ({"job": "job_0"}, "job"),
        ({"huggingface": "file_0"}, "huggingface"),
    ],
)
def test_a_value_is_shown_by_the_variant_that_it_has(
    run: Any, schemas: dict[str, Any], model: dict[str, str], title: str
) -> None:
    (field,) = (field for field in run("schema", "fieldsOf", schemas["train"]) if field["name"] == "model")
    assert field["variants"][run("schema", "chosen", field["variants"], model)]["title"] == title


def test_a_spec_without_its_defaults_is_the_same_spec(run: Any, schemas: dict[str, Any]) -> None:
    model = {"family": "convnet", "height": 8, "width": 8, "out_features": 10, "channels": [4]}
    given = {
        "train": {
            "model": model,
            "data": {"source": "digits"},
            "steps": 9,
            "optimizer": {"lr": 0.5},
            "parallel": {"tp": 2},
        },
        "verify": {
            "model": model,
            "property": {"robustness": {"data": {"source": "digits"}, "eps": 0.1}},
            "rigorous": True,
        },
        "compile": {"model": {**model, "safetensors": f"file_{'0' * 64}"}, "stall_s": None, "shapes": [4, 8]},
    }
    for kind, spec in given.items():
        whole = spec_adapter.validate_python({"kind": kind, **spec})
        short = run("schema", "withoutDefaults", json.loads(whole.model_dump_json(by_alias=True)), schemas[kind])
        assert short == {"kind": kind, **spec}
        assert spec_adapter.validate_python(short) == whole


def test_what_is_typed_into_a_field_is_read_as_it_is_shown(run: Any) -> None:
    for kind, text, value in (
        ("number", "1e-3", 0.001),
        ("list", "64, 128", [64, 128]),
        ("list", "job_1", ["job_1"]),
        ("map", "team=a, tried", {"team": "a", "tried": ""}),
        ("text", "12", "12"),
        ("free", '{"a": [1]}', {"a": [1]}),
        ("free", "latest", "latest"),
    ):
        field = {"type": kind}
        assert run("schema", "read", field, text) == value
        assert run("schema", "read", field, run("schema", "shown", field, value)) == value
    assert run("schema", "read", {"type": "text"}, "  ") is None


def test_a_field_that_is_emptied_leaves_no_empty_group(run: Any, bench: Page) -> None:
    assert run("schema", "changed", {"steps": 1}, "batch.global", 8) == {"steps": 1, "batch": {"global": 8}}
    emptied = """async () => (await import("/static/lib/schema.js")).changed(
      {steps: 1, optimizer: {lr: 1}, batch: {global: 8, micro: 2}}, "optimizer.lr", undefined)"""
    assert bench.evaluate(emptied) == {"steps": 1, "batch": {"global": 8, "micro": 2}}


@pytest.mark.parametrize(
    ("name", "path"),
    [("net.onnx", "model.onnx"), ("q.vnnlib.gz", "property.vnnlib"), ("all.ZIP", "property.instances")],
)
def test_a_file_goes_where_its_name_says(run: Any, name: str, path: str) -> None:
    draft = run("drafts", "withFile", {"kind": "train"}, name, "file_1")
    assert (draft["kind"], run("schema", "at", draft, path)) == ("verify", "file_1")
    assert run("drafts", "withFile", {"kind": "train"}, "notes.txt", "file_1") is None
