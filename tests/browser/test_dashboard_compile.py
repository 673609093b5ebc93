"""Pages of compile-checks, while they run and when their report is there."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from compile_report import REPORT
from fleet import Fleet, compile_spec, event, train_spec
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_a_climb_is_followed_before_there_is_a_report(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(compile_spec(phases=["train", "inference"], modes=["eager", "aot_eager", "inductor"]))

    def climbed(name: str, verdict: str, start: float) -> None:
        attempt.emit(event("span", 0, name=name, start=start, end=start + 12.0, detail={"verdict": verdict}))

    climbed("train/eager", "pass", 100.0)
    page.goto(f"/jobs/{attempt.job_id}")
    rows = page.locator(".ladder tbody tr")
    expect(rows).to_have_count(6)
    expect(rows.nth(0)).to_have_text("eager (Dynamo)trainpass12 s")
    expect(rows.nth(1)).to_contain_text("running")
    climbed("train/aot_eager", "fail_parity", 112.0)
    climbed("train/inductor", "not_reached", 124.0)
    expect(rows.nth(1)).to_contain_text("fail parity")
    expect(rows.nth(2)).to_contain_text("not reached")
    expect(rows.nth(3)).to_contain_text("running")
    expect(rows.nth(4)).not_to_contain_text("running")
    climbed("train/eager", "pass", 500.0)  # of another attempt
    expect(rows.nth(1)).to_contain_text("running")
    page.reload()
    expect(rows.nth(0)).to_contain_text("pass")
    expect(rows.nth(1)).to_contain_text("running")
    report = {"rungs": [{"rung": "eager", "phase": "train", "verdict": "pass"}], "gate": {"train": "eager"}}
    attempt.artifact("report.json", json.dumps(report).encode(), "application/json")
    expect(page.get_by_text("No report yet")).to_be_hidden()
    expect(page.locator("[data-rung]")).to_have_count(1)


@pytest.mark.slow
def test_a_gated_training_job_says_what_is_compiled(page: Page, fleet: Fleet) -> None:
    check = fleet.run(compile_spec(model=train_spec()["model"]))
    check.succeed({"gate": {"train": "inductor", "inference": "aot_eager"}})
    shown = {"train": "train with inductor", "inference": "inference with aot_eager"}
    for phase, words in shown.items():
        job = fleet.submit(train_spec(compile={phase: True, "gate": check.job_id}))
        page.goto(f"/jobs/{job.id}")
        expect(page.locator("#details")).to_contain_text(f"{words}, by the gate of compile-check")
    both = fleet.submit(train_spec(compile={"train": True, "inference": True, "gate": check.job_id}))
    page.goto(f"/jobs/{both.id}")
    expect(page.locator("#details")).to_contain_text("train, inference with aot_eager")


def test_a_compile_report_appears_when_it_is_there(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(compile_spec())
    page.goto(f"/jobs/{attempt.job_id}")
    expect(page.get_by_text("No report yet")).to_be_visible()
    attempt.artifact("report.json", json.dumps(REPORT).encode(), "application/json")
    attempt.succeed()
    check_rungs(page)
    check_detail_of_a_rung(page)
    check_permissions(page)
    expect(page.locator(".sentences")).to_contain_text("inductor gave fail_parity")
    expect(page.locator(".diagnosis")).to_contain_text("model.blocks.1")
    script = re.compile("/artifacts/diagnosis/train-inductor/repro")
    expect(page.locator(".diagnosis a")).to_have_attribute("href", script)
    expect(page.locator(".selftest summary")).to_have_text("Self-test: 1 of 2 injected faults judged correctly")


def test_an_open_gate_is_a_line_that_a_training_takes(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(compile_spec())
    open_gate = REPORT | {"gate": REPORT["gate"] | {"train": "eager"}}
    attempt.artifact("report.json", json.dumps(open_gate).encode(), "application/json")
    attempt.succeed({"gate": open_gate["gate"]})
    page.goto(f"/jobs/{attempt.job_id}")
    line = page.locator(".snippet code")
    expect(line).to_have_text(f"compile: {{train: true, gate: {attempt.job_id}}}")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".snippet").get_by_role("button", name="Copy").click()
    expect(page.locator(".notice")).to_have_text("The line is on the clipboard.")
    copied = yaml.safe_load(page.evaluate("navigator.clipboard.readText()"))
    trained = fleet.submit(train_spec(model=compile_spec()["model"], data={"source": "tokens"}, **copied))
    assert trained.spec["compile"] == {"train": True, "inference": False, "gate": attempt.job_id}
    page.goto(f"/jobs/{trained.id}")
    expect(page.locator("#details")).to_contain_text("by the gate of compile-check")


def check_rungs(page: Page) -> None:
    row = page.locator("[data-rung='inductor train']")
    expect(row).to_contain_text("fail parity")
    expect(row).to_contain_text("1.7e−2")
    expect(row.locator("td").nth(-1)).to_have_text("0.50×noisy")
    expect(row.locator("td").nth(-2)).to_contain_text("4.13")
    expect(page.locator("[data-rung='eager train']")).to_contain_text("eager (Dynamo)")
    expect(page.locator("[data-rung='eager train'] .noisy")).to_have_count(0)


def check_detail_of_a_rung(page: Page) -> None:
    page.locator("[data-rung='inductor train']").get_by_role("button").click()
    detail = page.locator(".ladder > tbody > .detail").nth(1)
    for words in (
        "gradients are too far from float64",
        "Tensor.item()",
        "model.py:118 in forward",
        "mutated inputs",
        "kernel launches",
    ):
        expect(detail).to_contain_text(words)
    expect(detail.locator("[data-failed]")).to_have_count(1)
    expect(page.get_by_role("row", name="Search.scores")).to_contain_text("search.py:40 in choose")
    expect(page.get_by_role("row", name="[8, 4]")).to_contain_text("scorer")


def check_permissions(page: Page) -> None:
    expect(page.locator(".permission")).to_have_count(1)
    expect(page.locator(".permission[data-phase='train'] .state")).to_have_text("denied")
    expect(page.locator(".permission .rungs li")).to_have_text(["eager (Dynamo)", "inductor"])
    expect(page.locator(".permission .rungs li").nth(1)).to_have_attribute("data-tone", "failed")
