"""What the page of a verification job says of its instances, searches and layers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fleet import Fleet, paired_spec, verify_spec
from playwright.sync_api import BrowserContext, Page, expect

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_a_job_about_many_models_says_so(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(paired_spec(fleet.store))
    page.goto(f"/jobs/{attempt.job_id}")
    note = page.locator("#verify .note")
    expect(note).to_have_text("crown · VNN-LIB instances")
    for instance, name in enumerate(["a.onnx one.vnnlib", "a.onnx two.vnnlib", "b c.onnx.gz one.vnnlib"]):
        attempt.bound(instance, 0.5, name=name)
    expect(note).to_have_text("crown · VNN-LIB instances · 2 models · 3 rows")


@pytest.mark.slow
def test_no_open_domain_is_drawn_at_the_foot_of_the_axis(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(verify_spec(method="beta-crown"))
    for second, left in enumerate([1, 300, 120, 0, 0]):
        attempt.search(0, domains=1 + 100 * second, open=left, bound=None, seconds=1.0 + second)
    page.goto(f"/jobs/{attempt.job_id}")
    canvas = page.locator("#search canvas").first
    expect(canvas).to_have_attribute("data-points", "5")
    canvas.scroll_into_view_if_needed()
    drawn = """(canvas) => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(() => {
        const ratio = canvas.width / canvas.clientWidth;
        const [left, foot] = [0.9 * (canvas.clientWidth - 64) + 52, canvas.clientHeight - 24];
        const { data } = canvas.getContext("2d").getImageData(left * ratio, (foot - 1) * ratio, 1, 2 * ratio);
        const curve = getComputedStyle(canvas).getPropertyValue("--series-1").trim();
        resolve([curve, [...data.slice(0, 3)]]);
    })))"""
    curve, pixel = canvas.evaluate(drawn)
    assert pixel == pytest.approx(list(bytes.fromhex(curve.removeprefix("#"))), abs=4)


@pytest.mark.slow
def test_verdict_and_times_of_long_names_are_in_view(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(paired_spec(fleet.store))
    model, query = f"onnx/{'a_long_name_' * 4}.onnx", f"vnnlib/{'of_a_query_' * 4}.vnnlib"
    attempt.bound(3, -1234.5, "falsified", name=f"{model} {query}", decided_by="activation splitting", domains=12_345)
    page.goto(f"/jobs/{attempt.job_id}")
    cells = page.locator(".verify tbody td")
    expect(cells.first).to_have_attribute("title", f"{model} {query}")
    expect(cells.first.locator(".cut")).to_have_text([f"3 · {model}", query])
    frame = page.locator(".verify .scroll")
    edge = "(cell) => cell.getBoundingClientRect().right"
    assert cells.last.evaluate(edge) <= frame.evaluate(edge)
    page.set_viewport_size({"width": 400, "height": 900})
    assert page.locator(".verify tbody .state").evaluate(edge) <= frame.evaluate(edge)


@pytest.mark.slow
def test_long_names_are_cut_where_they_are_alike(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(paired_spec(fleet.store))
    networks = [f"onnx/ACASXU_run2a_{network}_batch_2000.onnx" for network in ("1_1", "1_2", "2_1")]
    for instance, model in enumerate([*networks, "onnx/another_model_of_its_own.onnx"]):
        attempt.bound(instance, 0.5, name=f"{model} vnnlib/prop_{instance}.vnnlib")
    page.goto(f"/jobs/{attempt.job_id}")
    short = [
        *(f"{at} · …run2a_{each}_batch…" for at, each in enumerate(("1_1", "1_2", "2_1"))),
        "3 · onnx/another_model_of_its_own.onnx",
    ]
    expect(page.locator(".verify tbody .link")).to_have_text(short)
    expect(page.locator(".verify tbody .muted.cut").first).to_have_text("vnnlib/prop_0.vnnlib")


@pytest.mark.slow
def test_a_sample_has_its_class_and_a_row_without_bounds_no_bar(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(verify_spec())
    attempt.bound(0, 0.5, label=3, prediction=3)
    attempt.bound(1, -0.5, "falsified", label=3, prediction=5)
    attempt.bound(2, None, "unknown", lower=[], upper=[], decided_by=None, reason="no rule for ONNX Det")
    page.goto(f"/jobs/{attempt.job_id}")
    rows = page.locator(".verify tbody tr")
    expect(rows.locator(".instance")).to_have_text(["0class 3", "1class 3, predicted as 5", "2"])
    expect(rows.nth(2).locator(".by")).to_have_text("no rule for ONNX Det")
    expect(rows.locator(".bounds > *")).to_have_count(2)


@pytest.mark.slow
def test_what_is_out_of_sight_is_drawn_for_print(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(verify_spec(method="beta-crown"))
    attempt.search(0, domains=10, open=4, bound=None, seconds=1.0)
    page.set_viewport_size({"width": 900, "height": 120})
    page.goto(f"/jobs/{attempt.job_id}")
    canvas = page.locator("#search canvas").first
    expect(canvas).to_have_attribute("data-points", "1")
    # As wide as the page gives it: an untouched canvas is 300 pixels wide.
    assert canvas.evaluate("(canvas) => canvas.width === canvas.clientWidth") is False
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert canvas.evaluate("(canvas) => canvas.width === canvas.clientWidth") is True


@pytest.mark.slow
def test_what_is_undecided_says_why(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(verify_spec())
    nothing: dict[str, Any] = {"lower": [], "upper": [], "decided_by": None}
    attempt.bound(0, None, "unknown", reason="odd.onnx: no rule for ONNX Det", **nothing)
    page.goto(f"/jobs/{attempt.job_id}")
    page.locator(".verify tbody .link").click()
    expect(page.locator(".outputs header")).to_contain_text("undecided: odd.onnx: no rule for ONNX Det")


@pytest.mark.slow
def test_a_counterexample_is_copied_to_the_last_digit(page: Page, context: BrowserContext, fleet: Fleet) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    values = [0.1 + 0.2, 1 / 3, -1e-17, 5e300, 0.0, 1.0]
    attempt = fleet.run(verify_spec())
    outputs = {"counterexample_outputs": [1 / 3, None], "onnxruntime_outputs": [0.3, -2.5]}
    attempt.bound(0, -0.25, "falsified", counterexample=values, **outputs)
    page.goto(f"/jobs/{attempt.job_id}")
    page.locator(".verify tbody .link").click()
    page.get_by_text("Counterexample (6 inputs)").click()
    expect(page.locator(".outputs details h4")).to_have_text(
        ["Outputs there, in float64", "Outputs there, by onnxruntime"]
    )
    shown = page.locator(".values").all_inner_texts()
    assert [json.loads(text) for text in shown] == [values, *outputs.values()]
    page.locator(".outputs details").get_by_role("button", name="Copy").first.click()
    expect(page.locator(".notice")).to_have_text("The counterexample is on the clipboard.")
    assert json.loads(page.evaluate("navigator.clipboard.readText()")) == values


@pytest.mark.slow
def test_a_margin_above_zero_does_not_say_that_its_instance_is_verified(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(verify_spec(method="beta-crown"))
    attempt.bound(0, 1e-7, "unknown", decided_by=None, reason="the bounds do not decide it")
    attempt.bound(1, 0.0, "verified")  # its boxes were cut until nothing was left of them
    attempt.search(1, domains=10, open=0, bound=0.0, seconds=1.0)
    page.goto(f"/jobs/{attempt.job_id}")
    expect(page.locator("#verify tbody .state")).to_have_text(["unknown", "verified"])
    units = page.locator("#verify figure .unit, #search figure .unit")
    margin, bound = "lower bound, in the colour of the verdict", "of the margin, over all domains"
    expect(units).to_have_text([margin, "bounded, and still open", bound])
    attempt.bound(2, None, "falsified")
    expect(page.locator("#verify figure .unit")).to_have_text(
        "lower bound, in the colour of the verdict; × has no margin"
    )


@pytest.mark.slow
def test_what_is_falsified_without_a_margin_has_its_place_in_the_picture(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(verify_spec())
    for instance, margin in enumerate([0.5, None, 0.25]):
        attempt.bound(instance, margin, "verified" if margin else "falsified")
    page.goto(f"/jobs/{attempt.job_id}")
    canvas = page.locator(".verify canvas")
    expect(canvas).to_have_attribute("data-points", "3")
    expect(canvas).to_have_attribute("data-bare", "1")
    places, red = canvas.evaluate(
        """(canvas) => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(() => {
        const red = getComputedStyle(canvas).getPropertyValue("--bad").trim();
        const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const close = (at) => [1, 3, 5].every((digit, index) =>
          Math.abs(parseInt(red.slice(digit, digit + 2), 16) - data[at + index]) < 5) && data[at + 3] === 255;
        const found = [];
        for (let at = 0; at < data.length; at += 4) if (close(at)) found.push(((at / 4) % width) / width);
        resolve([found, red]);
    })))"""
    )
    assert places, red
    assert all(0.45 < place < 0.6 for place in places)


@pytest.mark.slow
def test_layers_are_grouped_by_model(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(paired_spec(fleet.store))
    measured = {"operator": "aten.relu", "neurons": 8, "mean_width": 1.5, "mean_unstable": 2.0}
    layers = [
        {"layer": f"{model}: stage 0: relu_{index}", **measured} for model in ("a.onnx", "b.onnx") for index in (1, 2)
    ]
    attempt.succeed({"verdicts": {"verified": 1}, "layers": layers})
    page.goto(f"/jobs/{attempt.job_id}")
    section = page.locator("#layers")
    expect(section.locator(".note")).to_have_text("2 models · 4 nonlinear layers · means per instance")
    expect(section.locator(".link")).to_have_text(["a.onnx", "b.onnx"])
    shown = section.locator("td.code:visible")
    expect(shown).to_have_text(["stage 0: relu_1", "stage 0: relu_2"])
    section.get_by_role("button", name="b.onnx").click()
    expect(shown).to_have_count(4)
