"""The page of a job, for somebody who asks what came of it, where it broke, and what uses it."""

from __future__ import annotations

import re

import pytest
from dashboard_service import Complaints
from fleet import Fleet, train_spec, verify_spec
from playwright.sync_api import Page, expect

from service.jobs.files import FILES, META
from service.jobs.records import JobError

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_evaluations_are_marked_and_the_best_is_named(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec())
    for step, loss in ((10, 0.9), (20, 0.25), (30, 0.5)):
        attempt.metric(step, loss=loss, eval_loss=loss)
    page.goto(f"/jobs/{attempt.job_id}")
    chart = page.locator("[data-chart='Loss']")
    expect(chart.locator("[data-name='eval_loss'] .best")).to_have_text("best 0.2500 at 20")
    attempt.metric(40, loss=0.1, eval_loss=0.1)
    expect(chart.locator("[data-name='eval_loss'] .best")).to_have_text("")


def test_a_part_of_all_charts_is_shown_and_curves_are_smoothed(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec())
    for step in range(101):
        attempt.metric(step, loss=float(step % 2), lr=0.1, eval_loss=1.0)
    attempt.succeed()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.split("/v1/")[-1]))
    page.goto(f"/jobs/{attempt.job_id}")
    loss, rate = (page.locator(f"[data-chart='{name}']") for name in ("Loss", "Learning rate"))
    expect(loss.locator("canvas")).to_have_attribute("data-view", "0 to 100")
    job = f"jobs/{attempt.job_id}"
    assert [path for path in asked if path == job or "/metrics?" in path] == [job, f"{job}/metrics?max_points=2000"]
    box = loss.locator("canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 4, box["y"] + 40)
    page.mouse.up()
    for chart in (loss, rate):
        expect(chart.locator("canvas")).to_have_attribute("data-view", re.compile(r"^[45]\d(\.\d+)? to 100$"))
    for _ in range(2):
        loss.locator("canvas").press("-")
    expect(rate.locator("canvas")).to_have_attribute("data-view", "0 to 100")
    loss.locator("canvas").press("+")
    rate.get_by_role("button", name="whole").click()
    expect(loss.locator("canvas")).to_have_attribute("data-view", "0 to 100")
    page.get_by_label("Smoothing").fill("0.99")
    expect(loss.locator("[data-name='loss'] .value")).to_have_text(re.compile(r"^0\.4\d+$"))
    expect(loss.locator("[data-name='eval_loss'] .value")).to_have_text("1")


def test_the_log_of_a_job_that_broke_opens_at_the_cause(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec())
    for index in range(200):
        attempt.log(f"before {index}")
    for line in ("Traceback (most recent call last):", *["  a frame"] * 30, "ValueError: the cause"):
        attempt.log(line, rank=1, stream="stderr")
    for index in range(200):
        attempt.log(f"after {index}")
    attempt.fail(JobError(type="ValueError", message="no", rank=1))
    page.goto(f"/jobs/{attempt.job_id}")
    line = page.locator("#log [data-breaking]")
    expect(line).to_contain_text("ValueError: the cause")
    page.wait_for_function(
        """() => {
          const [line, view] = [document.querySelector("#log [data-breaking]"), document.querySelector("#log .lines")];
          const top = line.getBoundingClientRect().top - view.getBoundingClientRect().top;
          return view.clientHeight > 0 && top > view.clientHeight / 2 && top < view.clientHeight * 0.8;
        }"""
    )


def test_attempts_stand_side_by_side(page: Page, fleet: Fleet) -> None:
    first = fleet.run(train_spec(retries=1))
    first.metric(1, loss=1.0)
    first.fail(JobError(type="ValueError", message="one went wrong", rank=0))
    page.goto(f"/jobs/{first.job_id}")
    expect(page.locator("#history li").first).to_be_visible()
    expect(page.locator("#attempts")).to_be_hidden()
    second = fleet.begin(first.job_id)
    second.metric(2, loss=0.5)
    second.log("of the second")
    second.succeed()
    rows = page.locator("#attempts tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("one went wrong")
    expect(rows.last.locator(".state")).to_have_text("succeeded")
    with page.expect_download() as saved:
        rows.last.get_by_role("link", name="log").click()
    assert saved.value.suggested_filename == f"{first.job_id}-2.log"
    assert "of the second" in saved.value.path().read_text()


def test_methods_that_were_asked_the_same_are_compared(page: Page, fleet: Fleet) -> None:
    jobs = []
    for method, verified in (("ibp", 3), ("crown", 9)):
        attempt = fleet.run(verify_spec(method, method=method))
        attempt.succeed(
            {"verdicts": {"verified": verified, "unknown": 10 - verified}, "seconds": 2.0, "mean_width": 0.5}
        )
        jobs.append(attempt.job_id)
    page.goto(f"/jobs/{jobs[0]}")
    methods = page.locator("#methods")
    expect(methods.locator("tbody tr")).to_have_count(2)
    expect(methods.locator("tbody strong")).to_have_text("ibp")
    expect(methods.locator(f"[data-job='{jobs[1]}'] :is(th, td)")).to_contain_text(
        ["crown", "9", "–", "1", "–", "0.5000", "2.0"]
    )
    methods.get_by_role("link", name="Compare").click()
    expect(page.locator("#summary")).to_have_text("2 jobs")


def test_the_mesh_is_drawn_with_what_lives_where(page: Page, fleet: Fleet) -> None:
    fleet.host("wide", cpu=8)
    model = {"family": "transformer", "vocab_size": 256, "dim": 64, "layers": 4, "heads": 4}
    parallel = {"pp": 2, "tp": 2}
    attempt = fleet.run(train_spec(model=model, data={"source": "tokens", "sequence": 32}, parallel=parallel))
    attempt.metric(1, loss=1.0, bubble_fraction=0.6)
    attempt.metric(2, **{"device_busy.0": 0.9, "device_busy.1": 0.4})
    attempt.metric(2, **{"calls/stage 0/train/8x32": 4, "calls/stage 0 blocks/train/8x32": 8})
    page.goto(f"/jobs/{attempt.job_id}")
    layout = page.locator("#layout")
    expect(layout.locator("th")).to_have_text(["stage 0 of 2: blocks 0–1", "stage 1 of 2: blocks 2–3"])
    expect(layout.locator("[data-rank='3']")).to_contain_text(re.compile(r"rank 3\S+ cpu \d"))
    expect(layout).to_contain_text("1/2 of each layer")
    plan = page.locator("#plan")
    expect(plan.locator(".figures")).to_contain_text("measured bubble60.0\u202f%")
    expect(plan).to_contain_text("The measured bubble is larger by what ranks wait for besides")
    entries = page.locator("#metrics .chart", has_text="Utilisation").locator(".entry")
    expect(entries).to_have_text(["rank 090.0\u202f%", "rank 140.0\u202f%"])
    calls = page.locator("#metrics .chart", has_text="Calls of modules").locator(".entry")
    expect(calls).to_have_text(["stage 0 · train · 8x324", "stage 0 blocks · train · 8x328"])


@pytest.mark.slow
def test_a_training_names_what_uses_it(page: Page, fleet: Fleet) -> None:
    trained = fleet.run(train_spec("trained"))
    trained.succeed()
    checked = fleet.run(verify_spec("its robustness", model={"job": trained.job_id}))
    checked.succeed({"verdicts": {"verified": 3, "falsified": 0, "unknown": 0, "timeout": 0}, "instances": 3})
    page.goto(f"/jobs/{trained.job_id}")
    users = page.locator("#details .users")
    expect(users.get_by_role("link", name="its robustness")).to_have_attribute("href", f"/jobs/{checked.job_id}")
    expect(users).to_contain_text("3 of 3 proved")
    users.get_by_role("link", name="1 job").click()
    expect(page.locator("#rows .name")).to_have_text(["its robustness"])


def test_what_a_job_has_told_is_on_its_page(page: Page, fleet: Fleet) -> None:
    """Nothing listens at that address, and none is allowed: the notice is given up, and says why."""
    attempt = fleet.run(train_spec(notify={"webhook": "http://127.0.0.1:9/hook", "on": ["succeeded"]}))
    page.goto(f"/jobs/{attempt.job_id}")
    expect(page.locator("#told")).to_contain_text("Nothing was to be told so far")
    attempt.succeed()
    told = page.locator("#told [data-notice='failed']")
    expect(told).to_contain_text("succeeded")
    expect(told).to_contain_text("neither a public address")
    page.goto(f"/jobs/{fleet.run(train_spec()).job_id}")
    expect(page.locator("#history li").first).to_be_visible()
    expect(page.locator("#told")).to_be_hidden()


@pytest.mark.slow
def test_a_running_job_lists_its_checkpoints(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec())
    folder = fleet.data.job(attempt.job_id).checkpoints / "step_50"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"12345")
    (folder / META).write_text(f'{{"{FILES}": {{"weights": 5}}}}')
    page.goto(f"/jobs/{attempt.job_id}")
    expect(page.locator("#artifacts").get_by_role("link", name="checkpoints/step_50/")).to_be_visible()


def test_sample_counterexample_and_difference_are_side_by_side_at_an_address(page: Page, fleet: Fleet) -> None:
    """A witness is the sample itself."""
    attempt = fleet.run(verify_spec())
    outputs = [0.0] * 10
    outputs[3], outputs[5] = 7.499, 7.446
    at = {"label": 5, "counterexample": [0.5] * 64, "counterexample_outputs": outputs}
    attempt.bound(
        0, -0.05, "falsified", sample=[0.5] * 63 + [0.375], sample_outputs=[0.0] * 5 + [8.0] + [0.0] * 4, **at
    )
    attempt.bound(1, -0.05, "falsified", decided_by="witness", **at)
    page.goto(f"/jobs/{attempt.job_id}")
    page.locator("#verify tbody button").first.click()
    expect(page.locator(".pictured canvas")).to_have_count(3)
    names = [f"{name}, 8 by 8 pixels" for name in ("The sample", "The counterexample", "The difference")]
    sample, found, between = (
        page.locator(".pictured").filter(has=page.get_by_role("img", name=name)) for name in names
    )
    expect(sample).to_contain_text("Taken for class 5")
    expect(found).to_contain_text("Taken for class 3")
    expect(found).to_contain_text("Class 3 has 7.4990, class 5 7.4460.")
    expect(between).to_contain_text("At most 0.125 in an input")
    page.goto("/")
    page.goto(f"/jobs/{attempt.job_id}#instance-1")
    expect(page.locator(".pictured")).to_contain_text("It is the sample itself, of class 5.")


@pytest.mark.slow
def test_an_address_without_a_page_leads_back(page: Page, complaints: Complaints) -> None:
    complaints.expected = ("404",)
    answer = page.goto("/nope")
    assert answer is not None
    assert answer.status == 404
    page.get_by_role("link", name="All jobs").click()
    expect(page.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()
    data = page.request.get("/nope", headers={"Accept": "application/json"})
    assert data.headers["content-type"] == "application/problem+json"
