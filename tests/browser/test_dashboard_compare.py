"""Jobs beside each other: curves on one axis, what differs, a matrix of verdicts, a file to save."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from fleet import Attempt, Fleet, submit_sweep, train_spec, verify_spec
from playwright.sync_api import Page, Route, expect

from service.jobs.store import JobFilter

pytestmark = pytest.mark.browser
LOSSES = ((0.001, 0.5), (0.01, 0.3), (0.1, 0.2))
"""Rates and what came of them."""


def trained(fleet: Fleet, name: str, lr: float, loss: float, **changes: Any) -> Attempt:
    attempt = fleet.run(train_spec(name, optimizer={"lr": lr}, **changes))
    for step in range(1, 21):
        attempt.metric(step, of=20, loss=loss + 1 / step, accuracy=1 - loss)
    attempt.succeed({"loss": loss, "eval_accuracy": 1 - loss, "data_sha256": "c1" * 32})
    return attempt


def test_selected_jobs_are_compared_and_saved(page: Page, fleet: Fleet, tmp_path: Path) -> None:
    slow, fast = trained(fleet, "slow", 0.001, 0.5), trained(fleet, "=fast", 0.01, 0.25)
    page.goto("/")
    page.get_by_label("Select slow").check()
    bar = page.get_by_role("region", name="Selected jobs")
    expect(bar.get_by_role("link", name="Compare")).to_be_hidden()
    page.get_by_label("Select =fast").check()
    bar.get_by_role("link", name="Compare").click()
    expect(page.locator("#summary")).to_have_text("2 jobs")
    chart = page.locator("#curves .chart")
    expect(chart.locator(".legend .entry")).to_have_text(["slow0.5500", "=fast0.3000"])
    page.get_by_label("Metric").select_option("accuracy")
    expect(chart.locator(".legend .entry")).to_have_text(["slow50.0\u202f%", "=fast75.0\u202f%"])
    rows = page.locator("#table tbody tr")
    expect(rows.locator("th")).to_have_text(["slow", "=fast"])
    expect(rows.locator("th").first).to_have_css("vertical-align", "middle")  # as what stands beside it
    head = page.locator("#table thead")
    expect(head.get_by_role("button")).to_have_text(
        ["job", "state", "duration", "optimizer.lr", "loss", "eval_accuracy"]
    )
    expect(page.locator("#table .same")).to_have_text("The same for all: data_sha256 c1c1c1…c1c1")
    head.get_by_role("button", name="loss").click()
    expect(rows.locator("th")).to_have_text(["=fast", "slow"])
    assert parse_qs(urlsplit(page.url).query)["sort"] == ["result.loss"]
    page.reload()
    expect(rows.locator("th")).to_have_text(["=fast", "slow"])
    expect(page.get_by_label("Metric")).to_have_value("accuracy")
    with page.expect_download() as saving:
        page.get_by_role("button", name="Save as CSV").click()
    saving.value.save_as(tmp_path / "jobs.csv")
    with (tmp_path / "jobs.csv").open(newline="") as file:
        saved = list(csv.DictReader(file))
    assert {row["result.data_sha256"] for row in saved} == {"c1" * 32}
    assert [(row["id"], row["job"], row["result.loss"]) for row in saved] == [
        (fast.job_id, "'=fast", "0.25"),
        (slow.job_id, "slow", "0.5"),
    ]


def test_jobs_that_differ_in_their_seed_are_their_mean(page: Page, fleet: Fleet) -> None:
    for lr, seed, loss in ((0.1, 0, 0.2), (0.1, 1, 0.4), (0.01, 0, 0.9)):
        trained(fleet, f"rate {lr}", lr, loss, seed=seed)
    page.goto("/compare?sweep=none")
    entries = page.locator("#curves .legend .entry")
    expect(entries).to_have_count(3)
    page.get_by_label("Mean of seeds").check()
    expect(entries).to_have_text(["rate 0.010.9500", "rate 0.1 (2 seeds)0.3500"])
    colours = "rows => rows.map((row) => row.querySelector('.swatch').style.background)"
    assert page.locator("#table tbody tr").evaluate_all(colours) == [f"var(--series-{index})" for index in (0, 1, 1)]


def test_results_are_drawn_over_fields_of_the_specs(page: Page, fleet: Fleet) -> None:
    """Each job is a point over a field and a result, and a line over all fields that differ; both lead to it."""
    found = [trained(fleet, f"lr {lr}", lr, loss, seed=seed) for seed, (lr, loss) in enumerate(LOSSES)]
    page.goto(f"/compare?ids={','.join(one.job_id for one in found)}")
    plane = page.locator("#plane")
    expect(plane.get_by_label("Across")).to_have_value("optimizer.lr")
    expect(plane.get_by_label("Upwards")).to_have_value("result.eval_accuracy")
    expect(plane.locator("circle")).to_have_count(3)
    drawn = plane.locator("circle").evaluate_all(
        "all => all.map((each) => [each.cx.baseVal.value, each.cy.baseVal.value])"
    )
    assert sorted(drawn, key=lambda at: -at[1]) == sorted(drawn), "higher rates did better here"
    plane.get_by_label("Upwards").select_option("result.loss")
    mark = plane.get_by_role("link", name="lr 0.01: optimizer.lr 0.01, loss 0.3")
    mark.hover()
    expect(plane.locator(".reading")).to_have_text("lr 0.01: optimizer.lr 0.01, loss 0.3")
    plane.get_by_role("button", name="lines").click()
    expect(plane.locator("polyline")).to_have_count(3)
    expect(plane.locator("text.name")).to_have_text(["optimizer.lr", "seed", "loss"])
    page.reload()
    expect(plane.locator("polyline")).to_have_count(3)
    plane.locator(".mark").first.focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"/jobs/{found[0].job_id}"))


def test_layouts_are_speed_against_memory(page: Page, fleet: Fleet) -> None:
    """What a training reports while it runs is settled by the later half of its curve."""
    found = []
    for tp, speed, memory in ((1, 100.0, 8.0), (2, 170.0, 5.0), (4, 220.0, 3.5)):
        attempt = fleet.run(train_spec(f"tp {tp}", parallel={"tp": tp}))
        for step in range(1, 11):
            attempt.metric(step, of=10, loss=1 / step, samples_per_s=speed if step > 2 else 1.0, memory_gib=memory)
        attempt.succeed({"loss": 0.1})
        found.append(attempt.job_id)
    page.goto(f"/compare?ids={','.join(found)}")
    plane = page.locator("#plane")
    expect(plane.get_by_label("Across")).to_have_value("measured.memory_gib")
    expect(plane.get_by_label("Upwards")).to_have_value("measured.samples_per_s")
    expect(plane.get_by_role("link", name="tp 4: memory_gib 3.5, samples_per_s 220")).to_be_visible()


@pytest.mark.slow
def test_verification_jobs_are_a_matrix_of_verdicts(page: Page, fleet: Fleet) -> None:
    quick, thorough = (fleet.run(verify_spec(method, method=method)) for method in ("ibp", "crown"))
    for attempt, verdict in ((quick, "unknown"), (thorough, "verified")):
        attempt.bound(0, 0.5)
        attempt.bound(1, 0.01, verdict)
    page.goto(f"/compare?ids={quick.job_id},{thorough.job_id}")
    matrix = page.locator("#instances")
    expect(matrix.locator(".note")).to_have_text("2 instances, verdicts differ at 1")
    expect(matrix.locator("thead th[scope=col]")).to_have_text(["instance", "ibp", "crown"])
    expect(matrix.locator(".sums td").nth(1)).to_contain_text("2 of 2 decided")
    matrix.get_by_label("Only where they differ").check()
    expect(matrix.locator("tbody:not(.sums) tr")).to_have_count(1)
    expect(matrix.locator("tbody td .state")).to_have_text(["unknown", "verified"])
    expect(page.locator("#curves")).to_be_hidden()
    thorough.bound(1, -0.1, "falsified")
    expect(matrix.locator("tbody td .state")).to_have_text(["unknown", "falsified"])

    def cut(route: Route) -> None:
        route.fulfill(json=route.fetch().json() | {"next_cursor": "2"})

    page.route("**/bounds?*", cut)
    page.reload()
    expect(matrix.locator(".note")).to_have_text("the first 2 instances, verdicts differ at 1")
    expect(matrix.locator(".sums th")).to_have_text("of these")
    page.unroute("**/bounds?*")


@pytest.mark.slow
def test_a_thousand_jobs_are_compared(page: Page, fleet: Fleet) -> None:
    sweep = submit_sweep(fleet, "seeds", 1000)
    for index, job in enumerate(reversed(fleet.store.jobs.list(JobFilter(sweep=sweep), limit=1000).items)):
        attempt = fleet.begin(job.id)
        attempt.metric(1, loss=3.0)
        attempt.metric(2, loss=index / 1000)
        attempt.succeed({"loss": index / 1000})
    page.goto(f"/jobs/{sweep}")
    page.locator("#sweep").get_by_role("link", name="Compare").click()
    rows = page.locator("#table tbody tr")
    expect(rows).to_have_count(1000)
    expect(page.locator("#curves .note")).to_contain_text("1000 curves")
    page.locator("#table thead").get_by_role("button", name="loss").click()
    expect(rows.first).to_contain_text("seed=0")
    rows.first.get_by_role("link").focus()
    assert page.evaluate("document.activeElement.textContent") == "seed=0"


@pytest.mark.slow
def test_a_comparison_of_nothing_says_how_to_begin(page: Page, fleet: Fleet) -> None:
    page.goto("/compare")
    expect(page.get_by_text("Nothing to compare")).to_be_visible()
    page.locator("#blank").get_by_role("link", name="Jobs").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
