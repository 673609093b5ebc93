"""Curves, as the browser works them out: thinned series, panels, axes, labels."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Page

pytestmark = pytest.mark.browser


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
    y[1_790] = math.nan
    kept = run("decimate", "decimate", x, y, 0, 3_999, 100)
    assert 50.0 in kept["y"], "a gap behind an extreme takes nothing from it"
    assert any(math.isnan(each) for each in kept["y"])
    y[1_760], y[3_120] = math.inf, -math.inf  # the first of their columns
    kept = run("decimate", "decimate", x, y, 0, 3_999, 100)
    assert {50.0, -50.0} <= {*kept["y"]}


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
    told = [run("scales", "tickLabel", each) for each in (20_000, 20_010, 1_234_567, -9.92e-5, 2e9, 999_999_999.9)]
    assert told == ["20k", "20.01k", "1.234567M", "−9.92e−5", "2e9", "1e9"]


@pytest.mark.parametrize(
    ("low", "high", "second"),
    [
        (0.0, 1.0, "0.2"),
        (0.69314718, 0.69314722, "0.69314719"),
        (1.0, 1.000001, "1.0000002"),
        (0.00012, 0.00013, "1.22e−4"),
        (-12_345.672, -12_345.668, "−12345.671"),
        (15_000.0, 17_500.0, "15.5k"),
        (1e6, 1e6 + 50, "1000010"),
        (1e6, 1e6 + 5000, "1.001M"),
        (999_999_000.0, 1_000_001_000.0, "999999500"),
        (9.8e8, 1.02e9, "990M"),
        (1e9, 1e9 + 10, "1000000002"),
        (1.7e12, 1.7e12 + 50, "1700000000010"),
        (1.7e12, 1.75e12, "1.71e12"),
        (1e14, 1e14 + 5, "100000000000001"),
    ],
)
def test_neighbouring_ticks_have_labels_of_their_own_and_no_longer_ones(
    run: Any, low: float, high: float, second: str
) -> None:
    ticks = run("scales", "linearTicks", low, high, 5)
    told = [run("scales", "tickLabel", tick, run("scales", "stepAt", ticks, tick)) for tick in ticks]
    assert told[1] == second
    assert len({*told}) == len(ticks) >= 3
    shares = [run("scales", "percentLabel", tick, run("scales", "stepAt", ticks, tick)) for tick in ticks]
    assert len({*shares}) == len(ticks)


def test_labels_of_a_logarithmic_axis_are_short(run: Any) -> None:
    ticks = [0, 1e-6, 0.001, 0.5, 1, 2, 1e4, 1e6, 2e6, 1e9]
    told = [run("scales", "tickLabel", tick, run("scales", "stepAt", ticks, tick)) for tick in ticks]
    assert told == ["0", "1e−6", "0.001", "0.5", "1", "2", "10k", "1M", "2M", "1e9"]


@pytest.mark.parametrize("low", [0.3, 1.0, -1.0, 1e17])
def test_numbers_next_to_each_other_have_an_axis(run: Any, low: float) -> None:
    assert run("scales", "linearTicks", low, math.nextafter(low, math.inf), 5) == [low]


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


def test_counters_have_a_panel_each_with_a_curve_for_each_way_of_calling(run: Any) -> None:
    names = ["reentries/stage 0", "calls/stage 0/train/8x64", "calls/stage 0/inference/8x64", "outliving_results"]
    panels = run("series", "panels", [*names, "outliving_results/stage 0/Trainer.kept[…]"])
    assert [(panel["title"], len(panel["names"])) for panel in panels] == [
        ("Calls of modules", 2),
        ("Calls within a backward", 1),
        ("Results that outlive their step", 2),
    ]
    assert run("series", "ofLabels", names[1]) == {"key": "calls", "label": "stage 0 · train · 8x64"}


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


def test_the_best_of_a_metric_is_what_is_better_of_it(run: Any) -> None:
    assert run("series", "best", "eval_loss", [3, 1, 2]) == 1
    assert run("series", "best", "eval_accuracy", [0.1, 0.9, 0.9]) == 1
    assert run("series", "best", "lr", [1, 2]) is None
    assert run("series", "best", "loss", []) is None


def test_names_beside_points_lie_over_nothing(run: Any) -> None:
    area = {"left": 0, "right": 400, "top": 0, "bottom": 300}
    close = [{"x": 100, "y": 100}, {"x": 130, "y": 100}, {"x": 390, "y": 200}]
    first, second, third = run("labels", "places", close, ["one", "another", "at the edge"], area)
    assert (first["anchor"], second["anchor"], third["anchor"]) == ("end", "start", "end")
    crowd = [{"x": 200, "y": 150 + index / 10} for index in range(9)]
    placed = run("labels", "places", crowd, ["a long name"] * 9, area)
    assert 0 < sum(each is not None for each in placed) < 9


def test_smoothing_begins_at_the_first_value_and_keeps_constants(run: Any) -> None:
    assert run("series", "smoothed", [4.0, 4.0, 4.0], 0.9) == pytest.approx([4.0, 4.0, 4.0])
    assert run("series", "smoothed", [1.0, 3.0], 0.5) == pytest.approx([1.0, (0.5 + 3.0) / 1.5])
