"""What pages of other sites can do in the browser of somebody who is signed in, and files of jobs that open there."""

from __future__ import annotations

import pytest
from dashboard_service import Complaints, Service
from fleet import Fleet, train_spec
from http_receiver import Reply, listening
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

HTML = b"<script>window.hit = 1; top.hit = 1; fetch('/v1/jobs')</script>"
PROBES = """async ([service, job]) => {
  const tried = {};
  const attempt = async (name, call) => {
    try { tried[name] = await call(); } catch { tried[name] = "refused"; }
  };
  const send = (path, options) => fetch(service + path, {credentials: "include", ...options}).then((r) => r.status);
  await attempt("read", () => send("/v1/jobs"));
  await attempt("read with a header", () => send("/v1/jobs", {headers: {"X-Trivet-Session": "x"}}));
  await attempt("cancel", () => send(`/v1/jobs/${job}/cancel`, {method: "POST"}));
  const script = {method: "POST", headers: {"X-Trivet": "1"}};
  await attempt("cancel as a script", () => send(`/v1/jobs/${job}/cancel`, script));
  await attempt("cancel unseen", async () => {
    await fetch(`${service}/v1/jobs/${job}/cancel`, {method: "POST", mode: "no-cors", credentials: "include"});
    return "sent";
  });
  await attempt("frame", () => new Promise((resolve) => {
    const frame = document.createElement("iframe");
    frame.onload = () => {
      try { resolve(frame.contentDocument ? "blank" : "closed"); } catch { resolve("closed"); }
    };
    frame.src = `${service}/jobs/${job}`;
    document.body.append(frame);
  }));
  await attempt("script", () => new Promise((resolve) => {
    const script = document.createElement("script");
    script.onload = () => resolve("ran");
    script.onerror = () => resolve("refused");
    script.src = `${service}/v1/jobs/${job}`;
    document.body.append(script);
  }));
  await attempt("stream", () => new Promise((resolve) => {
    const source = new EventSource(`${service}/v1/events`, {withCredentials: true});
    source.onopen = () => resolve("open");
    source.onerror = () => { source.close(); resolve("refused"); };
  }));
  return tried;
}"""


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("localhost", marks=pytest.mark.slow)])
def test_another_sites_page_reads_nothing_and_changes_nothing(
    page: Page, fleet: Fleet, service: Service, complaints: Complaints, host: str
) -> None:
    """Of another port of this very host, to which the browser sends the same cookies, and of another host."""
    complaints.expected = ("",)
    job = fleet.submit(train_spec())
    page.goto("/")
    expect(page.locator("#rows tr")).to_have_count(1)
    with listening(lambda _: Reply(content=b"<p>hello</p>", media_type="text/html")) as url:
        page.goto(url.replace("127.0.0.1", host))
        tried = page.evaluate(PROBES, [service.url, job.id])
    assert tried.pop("cancel unseen") in ("sent", "refused")
    assert tried.pop("frame") == "closed"
    assert set(tried.values()) == {"refused"}, tried
    assert fleet.store.jobs.get(job.id).state == "queued"


def test_a_name_that_another_site_lets_lead_here_is_refused(
    visitor: Page, service: Service, complaints: Complaints
) -> None:
    """DNS rebinding: the browser takes the service for a part of that site."""
    complaints.expected = ("421", "favicon", "Cross-Origin-Opener-Policy")
    for path in ("/", "/v1/jobs", "/login"):
        answer = visitor.goto(f"http://rebound.example:{service.port}{path}")
        assert answer is not None
        assert answer.status == 421, path
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("page.html", "text/html"),
        pytest.param("drawing.svg", "image/svg+xml", marks=pytest.mark.slow),
        pytest.param("page.txt", "text/plain", marks=pytest.mark.slow),
        pytest.param("page.pdf", "application/pdf", marks=pytest.mark.slow),
    ],
)
def test_a_file_of_a_job_that_is_opened_is_saved_and_never_shown(
    page: Page, fleet: Fleet, name: str, media_type: str
) -> None:
    attempt = fleet.run(train_spec())
    attempt.artifact(name, HTML, media_type)
    page.goto(f"/jobs/{attempt.job_id}")
    here = page.url
    with page.expect_download() as saved:
        page.locator(".file a").click()
    assert saved.value.suggested_filename == name
    page.locator(".file a").evaluate("(link) => link.removeAttribute('download')")
    with page.expect_download() as again:
        page.locator(".file a").click()
    assert again.value.suggested_filename == name
    assert page.url == here
    assert page.evaluate("window.hit") is None
