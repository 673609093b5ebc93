"""A job is written in a form or as YAML, refused where it is wrong, and submitted."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fleet import Fleet, train_spec
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def field(page: Page, path: str) -> Any:
    return page.locator(f".field[data-path='{path}'] .entry > :is(input, select)")


def test_a_form_and_its_yaml_follow_each_other_until_the_job_is_submitted(page: Page, fleet: Fleet) -> None:
    page.goto("/")
    page.get_by_role("link", name="New job").first.click()
    text, verdict = page.get_by_label("The spec as YAML"), page.locator("#verdict")
    expect(verdict).to_have_text("It would be accepted: 1 job on 1 device.")
    field(page, "name").fill("from the form")
    field(page, "steps").fill("0")
    field(page, "steps").press("Tab")
    expect(text).to_have_value(re.compile(r"name: from the form\n(.*\n)*steps: 0"))
    expect(page.locator(".field[data-path='steps'] .problem")).to_contain_text("greater than or equal to 1")
    expect(page.get_by_role("button", name="Submit")).to_be_disabled()
    verdict.get_by_role("button", name="Go to line").click()
    assert page.evaluate("() => getSelection().toString()") == "steps: 0"
    page.keyboard.type("steps: 7  # few")
    expect(field(page, "steps")).to_have_value("7")
    expect(verdict).to_contain_text("It would be accepted")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", name="from the form")).to_be_visible()
    (job,) = fleet.store.jobs.list().items
    assert fleet.store.jobs.get(job.id).spec["steps"] == 7


@pytest.mark.slow
def test_a_model_and_a_query_are_dropped_and_become_a_verification(page: Page, fleet: Fleet) -> None:
    page.goto("/submit?kind=verify")
    expect(page.locator("#verdict")).to_contain_text("It would be accepted")
    form = page.get_by_label("Form of model")
    form.select_option("onnx")
    choosing = page.get_by_label("Upload a file for model.onnx")
    choosing.set_input_files({"name": "net.onnx", "mimeType": "application/octet-stream", "buffer": b"no model"})
    expect(field(page, "model.onnx")).to_have_value(re.compile("^file_[0-9a-f]{64}$"))
    expect(page.locator(".field[data-path='model.onnx'] .problem")).not_to_be_empty()
    dropped = page.evaluate_handle(
        "() => { const all = new DataTransfer(); all.items.add(new File(['(assert'], 'q.vnnlib')); return all; }"
    )
    page.locator("main").dispatch_event("drop", {"dataTransfer": dropped})
    expect(field(page, "property.vnnlib")).to_have_value(re.compile("^file_[0-9a-f]{64}$"))


@pytest.mark.slow
def test_a_job_is_run_again_with_changes_and_its_model_verified(page: Page, fleet: Fleet) -> None:
    done = fleet.run(train_spec("first", optimizer={"lr": 0.5}, labels={"team": "a"}))
    done.succeed({"loss": 0.5})
    page.goto(f"/jobs/{done.job_id}")
    page.get_by_role("link", name="Verify…").click()
    text = page.get_by_label("The spec as YAML")
    expect(text).to_have_value(re.compile(f"name: robustness of first\nmodel:\n  job: {done.job_id}"))
    page.go_back()
    page.get_by_role("link", name="Run again…").click()
    expect(text).to_have_value(re.compile("lr: 0.5"))
    expect(text).not_to_have_value(re.compile("weight_decay|stall_s"))
    expect(page.locator("#verdict")).to_contain_text("It would be accepted")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", name="first")).to_be_visible()
    again, before = (fleet.store.jobs.get(job.id) for job in fleet.store.jobs.list().items)
    assert again.spec == before.spec
