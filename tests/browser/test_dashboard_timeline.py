"""The timeline of a training job: the schedule as planned, and each step as the ranks measured it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fleet import Attempt, Fleet, event, train_spec
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

PIPELINE = {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b", "micro_batches": 4}}
EXECUTION, PLAN = "#execution canvas", "#plan canvas"
PIXELS = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const found = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) found.add(String(data.slice(at, at + 3)));
  return [...found];
}"""


def span(name: str, rank: int, start: float, end: float, step: int, **detail: Any) -> Any:
    return event("span", rank, name=name, start=start, end=end, detail={"step": step, **detail})


def step_spans(step: int, ranks: int = 2, micro: int = 4, began: float | None = None) -> list[Any]:
    """A step of 1F1B-like shape: data, then forwards and backwards, then the optimizer; times in milliseconds."""
    began = time.time() if began is None else began
    found = []
    for rank in range(ranks):
        at = began + 0.001 * rank
        found.append(span("data", rank, began, at, step))
        first = at
        for op, seconds in (("forward", 0.001), ("backward", 0.002)):
            for each in range(micro):
                found.append(span(op, rank, at, at + seconds, step, op=op, stage=rank, micro_batch=each))
                at += seconds
        found.append(span("forward_backward", rank, first, at, step))
        found.append(span("optimizer", rank, at, at + 0.001, step))
    return found


@pytest.fixture
def attempt(fleet: Fleet) -> Attempt:
    return fleet.run(train_spec("pipelined", **PIPELINE))


def drawn(page: Page, selector: str) -> None:
    """Wait until the canvas has been painted with its present data."""
    page.locator(selector).scroll_into_view_if_needed()
    page.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")


def test_a_step_is_drawn_and_read_by_pointer_and_keyboard(page: Page, attempt: Attempt) -> None:
    attempt.emit(*step_spans(1))
    page.goto(f"/jobs/{attempt.job_id}")
    canvas, reading = page.locator(EXECUTION), page.locator("#execution .reading")
    expect(canvas).to_have_attribute("data-cells", "22")
    expect(canvas).to_have_attribute("data-rows", "2")
    expect(page.locator("#execution .legend .entry")).to_have_text(["data", "optimizer", "forward", "backward"])
    drawn(page, EXECUTION)
    assert len(canvas.evaluate(PIXELS)) > 5
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 60, box["y"] + 28)
    expect(reading).to_contain_text("rank 0 · forward · stage 0 · micro-batch 0 · 1\u202fms")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    expect(reading).to_contain_text("micro-batch 1")
    page.keyboard.press("ArrowDown")
    expect(reading).to_contain_text("rank 1")


@pytest.mark.slow
def test_dragging_zooms_and_a_double_click_shows_all(page: Page, attempt: Attempt) -> None:
    attempt.emit(*step_spans(1))
    page.goto(f"/jobs/{attempt.job_id}")
    canvas = page.locator(EXECUTION)
    drawn(page, EXECUTION)
    before = canvas.evaluate("(canvas) => canvas.toDataURL()")
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 80, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 240, box["y"] + 20, steps=3)
    page.mouse.up()
    expect(canvas).to_have_attribute("data-zoomed", "")
    drawn(page, EXECUTION)
    assert canvas.evaluate("(canvas) => canvas.toDataURL()") != before
    page.locator("#execution").get_by_role("button", name="whole").click()
    expect(canvas).not_to_have_attribute("data-zoomed", "")
    canvas.focus()
    page.keyboard.press("+")
    expect(canvas).to_have_attribute("data-zoomed", "")
    canvas.dblclick()
    expect(canvas).not_to_have_attribute("data-zoomed", "")


@pytest.mark.slow
def test_steps_are_picked_and_the_newest_is_followed(page: Page, attempt: Attempt) -> None:
    for step in range(1, 41):
        attempt.emit(*step_spans(step))
    page.goto(f"/jobs/{attempt.job_id}")
    canvas = page.locator(EXECUTION)
    expect(canvas).to_have_attribute("data-step", "40")
    attempt.emit(*step_spans(41)[:5])
    attempt.emit(*step_spans(42))
    expect(canvas).to_have_attribute("data-step", "42")
    page.get_by_role("button", name="Earlier step").click()
    expect(canvas).to_have_attribute("data-step", "41")
    expect(canvas).to_have_attribute("data-cells", "5")
    page.get_by_label("Step", exact=True).select_option("3")
    expect(canvas).to_have_attribute("data-step", "3")
    expect(canvas).to_have_attribute("data-cells", "22")
    attempt.emit(*step_spans(43))
    expect(page.locator("#execution option")).to_have_count(44)
    expect(canvas).to_have_attribute("data-step", "3")


@pytest.mark.slow
def test_without_a_pipeline_there_is_a_timeline_but_no_schedule(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec())
    page.goto(f"/jobs/{attempt.job_id}")
    expect(page.locator("#metrics")).to_be_visible()
    expect(page.locator("#execution")).to_be_hidden()
    now = time.time()
    attempt.emit(
        span("data", 0, now, now + 0.001, 1),
        span("forward_backward", 0, now + 0.001, now + 0.01, 1),
        span("optimizer", 0, now + 0.01, now + 0.012, 1),
        span("checkpoint", 0, now + 0.012, now + 4.0, 1),
    )
    expect(page.locator(EXECUTION)).to_have_attribute("data-cells", "4")
    expect(page.locator("#execution .note")).to_contain_text("step 1 · 12\u202fms · 1 step measured")
    expect(page.locator("#plan")).to_be_hidden()


@pytest.mark.slow
def test_hundreds_of_spans_on_four_ranks_are_painted(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec(parallel={"dp_shard": 4}))
    attempt.emit(*step_spans(1, ranks=4, micro=150))
    page.goto(f"/jobs/{attempt.job_id}")
    canvas = page.locator(EXECUTION)
    expect(canvas).to_have_attribute("data-cells", "1212")
    expect(canvas).to_have_attribute("data-rows", "4")
    drawn(page, EXECUTION)
    assert len(canvas.evaluate(PIXELS)) > 3
