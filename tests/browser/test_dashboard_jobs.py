"""The list of jobs for somebody who has hundreds: what comes first, filters, folded sweeps, actions on many at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dashboard_service import Complaints, Service
from fleet import Fleet, submit_sweep, train_spec, verify_spec
from playwright.sync_api import BrowserContext, Page, expect

from service.jobs.kinds.registry import spec_adapter
from service.jobs.records import JobError

pytestmark = pytest.mark.browser

SHIFTS = """() => {
  window.shifts = 0;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) window.shifts += entry.value;
  }).observe({ type: "layout-shift", buffered: true });
}"""


def chip(page: Page, state: str) -> Any:
    return page.get_by_role("group", name="States").get_by_role("button", name=re.compile(rf"^{state}\s*\d"))


@pytest.mark.slow
def test_of_three_hundred_jobs_the_running_one_is_first(page: Page, fleet: Fleet) -> None:
    running = fleet.run(train_spec("the running one"))
    running.metric(42, of=100, loss=0.5)
    specs = [spec_adapter.validate_python(train_spec(f"job {index}", device="cuda")) for index in range(300)]
    fleet.store.jobs.accept_all(fleet.store.jobs.batch(specs, fleet.owner, project="default"))
    page.add_init_script(f"({SHIFTS})()")
    page.goto("/")
    names = page.locator("#rows .name")
    expect(names).to_have_count(50)
    expect(names.first).to_have_text("the running one")
    expect(names.nth(1)).to_have_text("job 0")
    expect(page.locator("#summary")).to_have_text("301 jobs")
    expect(chip(page, "running")).to_have_text("running1")
    expect(chip(page, "queued")).to_have_text("queued300")
    first = page.locator("#rows tr").first
    expect(first.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "42")
    heights = page.locator("#rows tr").evaluate_all("rows => rows.map((row) => row.offsetHeight)")
    assert set(heights) <= {34, 35}
    assert page.evaluate("window.shifts") < 0.1
    page.get_by_role("button", name="Next").click()
    expect(names.first).to_have_text("job 49")
    chip(page, "running").click()
    expect(names).to_have_text(["the running one"])


@pytest.mark.slow
def test_a_line_says_how_it_went(page: Page, fleet: Fleet) -> None:
    fleet.run(verify_spec("certified")).succeed(
        {"verdicts": {"verified": 28, "falsified": 3, "unknown": 1, "timeout": 0}, "instances": 32}
    )
    fleet.run(train_spec("trained")).succeed({"loss": 0.1, "eval_accuracy": 0.975})
    fleet.run(train_spec("broken")).fail(JobError(type="ValueError", message="no such thing", rank=0))
    waiting = fleet.submit(train_spec("large", device="cuda", parallel={"dp_shard": 8}, priority=7))
    page.goto("/")
    for name, told in {
        "certified": "3 falsified, 1 unknown",
        "trained": "accuracy 97.5",
        "broken": "ValueError: no such thing",
        "large": "waits for",
    }.items():
        row = page.locator("#rows tr").filter(has=page.get_by_role("link", name=name, exact=True))
        expect(row.locator(".note")).to_contain_text(told)
        expect(row.get_by_role("link", name="admin", exact=True)).to_be_visible()
    expect(page.get_by_text("28 of 32 proved")).to_be_visible()
    expect(page.locator(f"tr[data-job='{waiting.id}'] .priority")).to_have_text("7")


@pytest.mark.slow
def test_filters_are_in_the_address_and_return_with_it(page: Page, fleet: Fleet) -> None:
    fleet.submit(train_spec("alpha", labels={"team": "vision"}))
    fleet.submit(train_spec("beta", labels={"team": "vision"}))
    fleet.submit(verify_spec("gamma"))
    gone = fleet.submit(train_spec("alpine", labels={"team": "vision"}))
    fleet.store.jobs.cancel(gone.id)
    page.goto("/")
    names = page.locator("#rows .name")
    expect(names).to_have_text(["alpha", "beta", "gamma", "alpine"])
    page.get_by_label("Label, or label=value").fill("team=vision")
    page.get_by_label("Owner").fill("admin")
    page.get_by_label("Project").fill("default")
    page.get_by_label("Project").press("Enter")
    expect(names).to_have_text(["alpha", "beta", "alpine"])
    page.get_by_label("Search names and ids").fill("alp")
    chip(page, "queued").click()
    chip(page, "cancelled").click()
    page.get_by_label("Order").select_option("newest")
    expect(names).to_have_text(["alpine", "alpha"])
    page.reload()
    expect(names).to_have_text(["alpine", "alpha"])
    expect(page.get_by_label("Owner")).to_have_value("admin")
    expect(chip(page, "cancelled")).to_have_attribute("aria-pressed", "true")
    expect(chip(page, "failed")).to_have_attribute("aria-pressed", "false")
    chip(page, "all").click()
    assert "state" not in page.url
    page.get_by_label("Owner").fill("nobody")
    page.get_by_label("Owner").press("Enter")
    page.get_by_role("link", name="Clear filters").click()
    expect(names).to_have_count(4)


@pytest.mark.slow
def test_a_filter_that_is_refused_says_why(page: Page, fleet: Fleet, complaints: Complaints) -> None:
    complaints.expected = ("422",)
    fleet.submit(train_spec())
    page.goto("/?project=No such name")
    expect(page.get_by_text("The jobs cannot be shown")).to_be_visible()
    page.get_by_role("link", name="Clear filters").click()
    expect(page.locator("#rows tr")).to_have_count(1)


@pytest.mark.slow
def test_a_sweep_is_one_line_until_it_is_unfolded(page: Page, fleet: Fleet) -> None:
    submit_sweep(fleet, "seeds", 3)
    page.goto("/")
    names = page.locator("#rows .name")
    expect(names).to_have_text(["seeds"])
    expect(page.locator("#rows .note")).to_have_text("0 of 3 succeeded, 3 queued")
    button = page.get_by_role("button", name="Jobs of the sweep seeds")
    button.focus()
    page.keyboard.press("Enter")
    expect(names).to_have_text(["seeds", "seed=0", "seed=1", "seed=2"])
    expect(button).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Enter")
    expect(names).to_have_text(["seeds"])
    page.get_by_label("Each job of sweeps").check()
    expect(names).to_have_count(4)


@pytest.mark.slow
def test_an_action_on_many_names_the_one_that_refused(page: Page, fleet: Fleet, complaints: Complaints) -> None:
    complaints.expected = ("409",)
    needed, plain = fleet.run(train_spec("needed")), fleet.run(train_spec("plain"))
    for job in (needed, plain):
        job.succeed()
    user = fleet.submit(train_spec("user", after=[fleet.submit(train_spec("first")).id, needed.job_id]))
    page.goto("/")
    names = page.locator("#rows .name")
    expect(names).to_have_text(["first", "user", "plain", "needed"])
    page.get_by_label("Select all jobs shown").check()
    bar = page.get_by_role("region", name="Selected jobs")
    expect(bar).to_contain_text("4 jobs selected")
    bar.get_by_role("button", name="Delete 2").click()
    question = page.get_by_role("dialog")
    expect(question).to_contain_text("Delete 2 jobs?")
    expect(question).to_contain_text("2 other selected jobs stay as they are.")
    question.get_by_role("button", name="Delete 2 jobs").click()
    refused = page.get_by_role("dialog", name="1 job deleted, 1 not")
    expect(refused.get_by_role("listitem")).to_have_count(1)
    expect(refused).to_contain_text("needed")
    expect(refused).to_contain_text(user.id)
    page.keyboard.press("Escape")
    expect(names).to_have_text(["first", "user", "needed"])
    expect(bar).to_contain_text("1 job selected")
    page.get_by_label("Select first").check()
    page.get_by_label("Select needed").uncheck()
    bar.get_by_role("button", name="Cancel 1").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel 1 job").click()
    expect(chip(page, "cancelled")).to_have_text(re.compile(r"cancelled[1-9]"))
    expect(bar).to_be_hidden()


def test_the_best_of_a_sweep_is_found_by_a_column_and_the_view_is_kept(page: Page, fleet: Fleet) -> None:
    for name, loss in {"middling": 0.5, "best": 0.25, "worst": 0.75}.items():
        fleet.run(train_spec(name)).succeed({"loss": loss})
    fleet.submit(train_spec("waiting", device="cuda", parallel={"dp_shard": 8}))
    page.goto("/")
    names = page.locator("#rows .name")
    expect(names).to_have_text(["waiting", "worst", "best", "middling"])
    page.locator("#columns summary").click()
    page.get_by_label("loss", exact=True).check()
    page.get_by_label("Priority").uncheck()
    page.keyboard.press("Escape")
    heading = page.locator("#head").get_by_role("button", name="loss")
    heading.click()
    expect(names).to_have_text(["worst", "middling", "best", "waiting"])
    heading.click()
    expect(names).to_have_text(["best", "middling", "worst", "waiting"])
    page.reload()
    expect(names).to_have_text(["best", "middling", "worst", "waiting"])
    expect(page.locator("#rows .measure")).to_have_text(["0.2500", "0.5000", "0.7500", "–"])
    expect(page.locator("#head th[aria-sort]")).to_have_text("loss▲")
    expect(page.locator("#head .priority")).to_have_count(0)
    heading.click()
    expect(names).to_have_text(["waiting", "worst", "best", "middling"])


@pytest.mark.slow
def test_a_click_that_has_begun_on_a_heading_is_not_lost_when_columns_change(page: Page, fleet: Fleet) -> None:
    fleet.submit(train_spec("some job", device="cuda"))
    page.goto("/")
    expect(page.locator("#rows .name")).to_have_text(["some job"])
    page.locator("#columns summary").click()
    page.locator("#head").get_by_role("button", name="Name").hover()
    page.mouse.down()
    page.get_by_label("Priority").evaluate("box => box.click()")
    expect(page.locator("#head .priority")).to_have_count(0)
    page.mouse.up()
    expect(page.locator("#head th[aria-sort]")).to_contain_text("Name")


@pytest.mark.slow
def test_a_running_job_has_its_curve_and_a_waiting_one_its_place(page: Page, fleet: Fleet) -> None:
    running = fleet.run(train_spec("running"))
    for step in range(1, 9):
        running.metric(step, of=10, loss=1 / step)
    fleet.submit(train_spec("large", parallel={"dp_shard": 4}))
    page.goto("/")
    row = page.locator(f"tr[data-job='{running.job_id}']")
    expect(row.locator(".note")).to_have_text("loss 0.1250")
    expect(row.get_by_role("img", name="from 1 to 0.1250")).to_be_visible()
    expect(page.locator("#rows tr").nth(1).locator(".note")).to_contain_text("no. 1 · waits for")
    heights = page.locator("#rows tr").evaluate_all("rows => rows.map((row) => row.offsetHeight)")
    assert max(heights) <= 36


@pytest.mark.slow
def test_a_key_that_only_reads_is_offered_nothing_that_would_be_refused(
    page: Page, context: BrowserContext, service: Service, fleet: Fleet
) -> None:
    failed = fleet.run(train_spec("broken"))
    failed.fail(JobError(type="ValueError", message="no", rank=0))
    reader = service.store.keys.verify(service.store.keys.create("reader", ("read",))[1])
    assert reader is not None
    session = service.store.sessions.begin(reader)
    context.clear_cookies()
    cookie: Any = {"name": "trivet_session", "value": session.cookie, "url": service.url, "sameSite": "Strict"}
    context.add_cookies([cookie])
    keep = f"localStorage.setItem('trivet-session', '{session.page}')"
    context.add_init_script(f"if (location.protocol === 'http:') {keep}")
    page.goto("/")
    expect(page.locator("#new")).to_be_hidden()
    page.get_by_label("Select broken").check()
    bar = page.get_by_role("region", name="Selected jobs")
    expect(bar).to_be_visible()
    expect(bar.get_by_role("button", name=re.compile("Retry|Delete|Cancel"))).to_have_count(0)
