"""Pages that nobody sees: they hold no connection, and lack nothing when they are seen again."""

from __future__ import annotations

import re

import pytest
from fleet import Fleet, submit_sweep, train_spec
from playwright.sync_api import Page, Request, Route, expect
from waiting import eventually

pytestmark = pytest.mark.browser

LOSS = ".chart[data-chart='Loss'] canvas"
STREAMS = "trivet_event_streams"


def show(page: Page, *, seen: bool) -> None:
    """What a browser does when its user goes to another tab, and comes back: no frames are drawn in between."""
    page.evaluate(
        """(hidden) => {
      window.drawn ??= window.requestAnimationFrame;
      window.held ??= [];
      window.requestAnimationFrame = hidden ? (draw) => window.held.push(draw) : window.drawn;
      for (const draw of hidden ? [] : window.held.splice(0)) window.requestAnimationFrame(draw);
      Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
      document.dispatchEvent(new Event("visibilitychange"));
    }""",
        not seen,
    )


def test_a_job_that_nobody_sees_holds_no_connection_and_lacks_nothing_when_it_is_seen(page: Page, fleet: Fleet) -> None:
    def streams() -> str:
        return next(line for line in page.request.get("/metrics").text().split("\n") if line.startswith(STREAMS))

    attempt = fleet.run(train_spec("far"))
    attempt.metric(1, loss=1.0)
    page.clock.install()
    page.goto(f"/jobs/{attempt.job_id}")
    expect(page.locator(LOSS)).to_have_attribute("data-points", "1")
    eventually(lambda: streams() == f"{STREAMS} 1.0")
    show(page, seen=False)
    eventually(lambda: streams() == f"{STREAMS} 0.0")
    attempt.metric(2, of=100, loss=0.5)
    page.clock.fast_forward(30_000)
    expect(page).to_have_title(re.compile(r"^2\W+far"))
    assert streams() == f"{STREAMS} 0.0"
    show(page, seen=True)
    expect(page.locator(LOSS)).to_have_attribute("data-points", "2")
    attempt.metric(3, loss=0.25)
    expect(page.locator(LOSS)).to_have_attribute("data-points", "3")


def test_a_list_that_is_seen_again_goes_on_from_what_it_fetched_then(page: Page, fleet: Fleet) -> None:
    def is_stream(request: Request) -> bool:
        return request.resource_type == "eventsource"

    def answer_later(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, headers={**answer.headers, "date": "Thu, 01 Jan 2099 00:00:00 GMT"})

    sweep = submit_sweep(fleet, "seeds", 1)
    (job,) = (job.id for job in fleet.store.jobs.list().items if job.id != sweep)
    attempt = fleet.begin(job)
    with page.expect_request(is_stream):
        page.goto("/")
    page.get_by_role("button", name="Jobs of the sweep seeds").click()
    row = page.locator("#rows tr").nth(1)
    expect(row).to_be_visible()
    show(page, seen=False)
    attempt.metric(50, of=100, loss=0.5)
    page.route(re.compile(r"/v1/jobs\?"), answer_later)
    with page.expect_request(is_stream) as resumed:
        show(page, seen=True)
    assert re.search("after=40709", resumed.value.url)
    expect(row.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "50")
