"""What changes on the pages while jobs run, without anybody reloading them."""

from __future__ import annotations

import io
import json
import re

import pytest
from dashboard_service import Complaints, Service
from fleet import Fleet, event, train_spec, verify_spec
from playwright.sync_api import Page, expect
from redis import Redis

from service.jobs.events import ProgressEvent
from service.jobs.records import JobError

pytestmark = pytest.mark.browser

LOSS = ".chart[data-chart='Loss'] canvas"
FINGERPRINT = 'document.querySelector("{}").toDataURL()'


def test_the_list_follows_jobs(page: Page, fleet: Fleet) -> None:
    job = fleet.submit(train_spec("watched"))
    page.goto("/")
    row = page.locator(f"tr[data-job='{job.id}']")
    expect(row.locator(".state")).to_have_text("queued")
    attempt = fleet.begin(job.id)
    expect(row.locator(".state")).to_have_text("running")
    expect(row.locator(".where")).to_contain_text("cpu-a cpu 0")
    attempt.metric(42, of=100, loss=0.5)
    expect(row.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "42")
    attempt.succeed()
    expect(row.locator(".state")).to_have_text("succeeded")
    expect(row.get_by_role("progressbar")).to_be_hidden()


@pytest.mark.slow
def test_phases_are_followed(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec("phased"))
    page.goto(f"/jobs/{attempt.job_id}")
    phases = page.locator("#details [data-phase]")
    expect(page.locator("#details [data-computed-by]")).to_contain_text("torch")
    expect(phases).to_have_text([re.compile("^starting ")])
    attempt.emit(event("phase", 0, name="importing"), event("phase", 0, name="loading"))
    expect(phases).to_have_text([re.compile(f"^{name} .*s$") for name in ("starting", "importing", "loading")])
    attempt.succeed()
    page.reload()
    expect(phases).to_have_count(3)


@pytest.mark.slow
def test_new_jobs_join_the_list(page: Page, fleet: Fleet) -> None:
    page.goto("/")
    expect(page.get_by_text("No jobs yet")).to_be_visible()
    fleet.submit(train_spec("late arrival"))
    expect(page.locator("#rows .name")).to_have_text("late arrival")


def test_a_curve_grows(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec())
    for step in range(1, 4):
        attempt.metric(step, of=10, loss=1 / step)
    page.goto(f"/jobs/{attempt.job_id}")
    canvas = page.locator(LOSS)
    expect(canvas).to_have_attribute("data-points", "3")
    before = page.evaluate(FINGERPRINT.format(LOSS))
    for step in range(4, 9):
        attempt.metric(step, of=10, loss=1 / step)
    expect(canvas).to_have_attribute("data-points", "8")
    expect(page.locator(".chart[data-chart='Loss'] .value")).to_have_text("0.1250")
    expect(page.locator(".jobhead").get_by_role("progressbar")).to_have_attribute("aria-valuenow", "80")
    expect(page).to_have_title(re.compile("^80"))
    page.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    assert page.evaluate(FINGERPRINT.format(LOSS)) != before


@pytest.mark.slow
def test_a_logarithmic_axis_and_hidden_series_change_the_picture(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec())
    for step in range(1, 50):
        attempt.metric(step, loss=10.0 ** (-step / 10), eval_loss=10.0 ** (-step / 20))
    attempt.succeed()
    page.goto(f"/jobs/{attempt.job_id}")
    expect(page.locator(LOSS)).to_have_attribute("data-points", "49")
    chart = page.locator(".chart[data-chart='Loss']")
    pictures = set()
    for button in (None, chart.get_by_role("button", name="log"), chart.get_by_role("button", name="eval_loss")):
        if button is not None:
            button.click()
        page.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
        pictures.add(page.evaluate(FINGERPRINT.format(LOSS)))
    assert len(pictures) == 3


@pytest.mark.slow
def test_the_log_is_followed_paused_and_filtered(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec(parallel={"dp_shard": 2}))
    for index in range(60):
        attempt.log(f"line {index}", rank=index % 2)
    page.goto(f"/jobs/{attempt.job_id}")
    view, lines = page.locator(".lines"), page.locator(".lines .line")
    expect(lines).to_have_count(60)
    attempt.log("line 60")
    expect(lines).to_have_count(61)
    view.scroll_into_view_if_needed()  # the curves stand above the log
    expect(lines.last).to_be_in_viewport()
    foot = "(view) => view.scrollHeight - view.scrollTop - view.clientHeight"
    assert view.evaluate(foot) < 4
    view.evaluate("(view) => { view.scrollTop = 0; }")
    expect(page.locator("#follow")).to_have_text("Paused")
    attempt.log("line 61")
    expect(lines).to_have_count(62)
    assert view.evaluate("(view) => view.scrollTop") == 0
    page.locator("#follow").click()
    expect(page.locator("#follow")).to_have_text("Following")
    assert view.evaluate(foot) < 4
    page.get_by_label("Rank").select_option("1")
    expect(lines).to_have_count(30)
    attempt.log("not for rank 1", rank=0)
    attempt.log("for rank 1", rank=1)
    expect(lines).to_have_count(31)
    page.get_by_label("Search the log").fill("FOR RANK")
    expect(lines).to_have_text([re.compile("for rank 1")])
    attempt.log("something else", rank=1)
    attempt.log("again for rank 1", rank=1)
    expect(lines).to_have_count(2)
    page.get_by_label("Search the log").fill("no such line")
    expect(page.get_by_text("No line like that")).to_be_visible()
    page.get_by_label("Search the log").fill("")
    expect(lines).to_have_count(33)
    attempt.log("RuntimeError: no", rank=1)
    page.get_by_label("Level").select_option("error")
    expect(lines).to_have_text([re.compile("RuntimeError: no")])
    attempt.log("nothing odd", rank=1)
    attempt.log("another ERROR", rank=1)
    expect(lines).to_have_count(2)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert "not for rank 1" in download.value.path().read_text()


def test_rows_of_a_verification_stream_in(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(verify_spec())
    attempt.bound(0, 0.5)
    page.goto(f"/jobs/{attempt.job_id}")
    rows = page.locator(".verify tbody tr")
    expect(rows).to_have_count(1)
    attempt.bound(2, -0.25, "falsified", counterexample=[0.5] * 64)
    attempt.bound(1, 0.125)
    attempt.bound(3, 0.0, "unknown", lower=[None, -1.0], upper=[None, 2.0])
    expect(rows).to_have_count(4)
    expect(rows.locator(".link")).to_have_text(["0", "1", "2", "3"])
    expect(page.locator("[data-verdict='verified'] strong")).to_have_text("2")
    expect(page.locator("[data-verdict='falsified'] strong")).to_have_text("1")
    expect(page.locator(".verify canvas")).to_have_attribute("data-points", "4")
    page.locator("[data-verdict='falsified']").click()
    expect(rows).to_have_count(1)
    rows.locator(".link").click()
    expect(page.locator(".outputs")).to_contain_text("Counterexample (64 inputs)")
    expect(page.locator(".outputs .bars li")).to_have_count(10)
    attempt.succeed(
        {"verdicts": {"verified": 2, "falsified": 1, "unknown": 1, "timeout": 0}, "mean_width": 1.5, "seconds": 2.0}
    )
    expect(page.locator("#result")).to_contain_text("1.5")


@pytest.mark.slow
def test_searches_are_followed_and_what_they_cost_is_shown(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(verify_spec(method="beta-crown"))
    attempt.search(3, domains=4, open=2, bound=None, seconds=0.5)
    page.goto(f"/jobs/{attempt.job_id}")
    search = page.locator("#search")
    expect(search.locator(".note")).to_have_text("instance 3 · 4 domains · 2 open · 500 ms")
    attempt.search(3, domains=40, open=12, bound=-0.25, seconds=1.5)
    expect(search.locator(".note")).to_contain_text("40 domains · 12 open · bound −0.250")
    expect(search.locator("canvas").first).to_have_attribute("data-points", "2")
    attempt.search(5, domains=7, open=1, bound=-0.5, seconds=0.5)
    expect(search.locator(".note")).to_contain_text("instance 5 · 7 domains")
    search.get_by_label("Instance").select_option("3")
    expect(search.locator(".note")).to_contain_text("instance 3 · 40 domains")
    page.reload()
    expect(search.locator(".note")).to_contain_text("instance 5 · 7 domains")
    attempt.bound(3, 0.02, name="prop_3.vnnlib", decided_by="activation splitting", domains=40)
    row = page.locator(".verify tbody tr")
    expect(row).to_contain_text("3 · prop_3.vnnlib")
    expect(row).to_contain_text("activation splitting")
    expect(row.locator(".rail i")).to_have_count(1)
    row.locator(".link").click()
    expect(search.locator(".note")).to_contain_text("instance 3 · 40 domains")
    layer = {"layer": "relu", "operator": "aten.relu", "neurons": 8, "mean_width": 1.5, "mean_unstable": 2.0}
    spent = {"prepare": 1.0, "layers": 0.0, "search": 3.0}
    attempt.succeed({"verdicts": {"verified": 1}, "layers": [layer], "time": spent, "memory_gib": 0.5})
    expect(page.locator("#cost li")).to_have_count(2)
    expect(page.locator("#cost")).to_contain_text("searching")
    expect(page.locator("#cost")).to_contain_text("75 %")
    expect(page.locator("#cost .note")).to_have_text("means over ranks · 0.500 GiB at most")
    expect(page.locator("#layers .rail i")).to_have_count(2)
    expect(search.locator("canvas").first).to_be_visible()
    search.get_by_label("Instance").select_option("5")
    expect(search.locator(".note")).to_contain_text("instance 5 · 7 domains")
    expect(search.locator("canvas").first).to_be_hidden()


@pytest.mark.slow
def test_the_question_of_a_verification_is_named(page: Page, fleet: Fleet) -> None:
    box = {"lower": [0.0] * 64, "upper": [1.0] * 64}
    declared = "".join(f"(declare-const X_{index} Real)" for index in range(64))
    declared += "".join(f"(declare-const Y_{index} Real)" for index in range(10))
    bounded = "".join(f"(assert (>= X_{index} 0))(assert (<= X_{index} 1))" for index in range(64))
    file = fleet.store.files.add(io.BytesIO(f"{declared}{bounded}(assert (<= Y_0 0))".encode()), "text/plain")
    ball = {"data": {"source": "digits"}, "eps": 0.5, "norm": 2}
    questions = {
        "input box": {"box": box},
        "VNN-LIB": {"vnnlib": file.id},
        "2 VNN-LIB files": {"vnnlib": [file.id, file.id]},
        "L2 ball of radius 0.5": {"robustness": ball},
        "2 entries changed by 0.5 within the data's range": {
            "robustness": {**ball, "norm": 0, "entries": 2, "clip": "data"}
        },
    }
    for words, question in questions.items():
        job = fleet.submit(verify_spec(property=question))
        page.goto(f"/jobs/{job.id}")
        expect(page.locator("#verify .note")).to_have_text(f"crown · {words}")


@pytest.mark.slow
def test_artifacts_appear_and_can_be_downloaded(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec())
    page.goto(f"/jobs/{attempt.job_id}")
    expect(page.get_by_text("No files yet")).to_be_visible()
    attempt.artifact("step_10/meta ü?.json", b'{"step": 10}', "application/json")
    link = page.locator(".artifacts a")
    expect(link).to_have_text("step_10/meta ü?.json")
    with page.expect_download() as download:
        link.click()
    assert download.value.path().read_bytes() == b'{"step": 10}'


def test_cancel_asks_first_and_retry_brings_back(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec("doomed"))
    page.goto(f"/jobs/{attempt.job_id}")
    state = page.locator(".jobhead .state")
    page.locator("#cancel").click()
    page.get_by_role("button", name="Go back").click()
    expect(state).to_have_text("running")
    page.locator("#cancel").click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(state).to_have_text("cancelling")
    attempt.stop()
    expect(state).to_have_text("cancelled")
    page.locator("#retry").click()
    page.get_by_role("button", name="Retry the job").click()
    expect(state).to_have_text("queued")
    again = fleet.begin(attempt.job_id)
    expect(state).to_have_text("running")
    again.metric(1, loss=0.5)
    expect(page.locator(LOSS)).to_have_attribute("data-points", "1")


@pytest.mark.slow
def test_a_queued_job_tells_why_it_waits_as_the_hosts_change(page: Page, fleet: Fleet) -> None:
    fleet.run(train_spec("holds every slot", parallel={"dp_replicate": 4}))
    job = fleet.submit(train_spec())
    fleet.store.attempts.place()
    page.goto(f"/jobs/{job.id}")
    reason = page.locator(".jobhead .reason").first
    expect(reason).to_have_text("waits for 1 free cpu device")
    expect(page.locator(".jobhead .turn")).to_have_text("next in the queue; start unknown")
    fleet.store.hosts.drain("cpu-a")
    fleet.store.attempts.place()
    expect(reason).to_have_text(
        "no hosts that take work have 1 free cpu device, even when idle (host cpu-a is draining)"
    )


@pytest.mark.slow
def test_a_queued_job_is_cancelled_from_the_list(page: Page, fleet: Fleet) -> None:
    job = fleet.submit(train_spec("not wanted"))
    page.goto("/")
    row = page.locator(f"tr[data-job='{job.id}']")
    page.get_by_label("Select not wanted").check()
    page.get_by_role("region", name="Selected jobs").get_by_role("button", name="Cancel 1").click()
    page.get_by_role("button", name="Cancel 1 job").click()
    expect(row.locator(".state")).to_have_text("cancelled")


def test_a_failure_is_shown_with_its_rank_and_traceback(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec())
    page.goto(f"/jobs/{attempt.job_id}")
    attempt.artifact("traceback.txt", b"Traceback (most recent call last)", "text/plain")
    attempt.fail(JobError(type="ValueError", message="loss is nan", rank=3, traceback_artifact="traceback.txt"))
    failure = page.locator(".failure")
    expect(failure).to_contain_text("ValueError on rank 3")
    expect(failure).to_contain_text("loss is nan")
    expect(failure.get_by_role("link")).to_have_attribute("href", f"/v1/jobs/{attempt.job_id}/artifacts/traceback.txt")


@pytest.mark.slow
def test_the_page_comes_back_after_the_service_did(
    page: Page, fleet: Fleet, service: Service, complaints: Complaints
) -> None:
    complaints.expected = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET")
    attempt = fleet.run(train_spec())
    attempt.metric(1, loss=1.0)
    attempt.log("before")
    page.goto(f"/jobs/{attempt.job_id}")
    connection = page.locator("#connection")
    expect(connection).to_have_attribute("data-state", "live")
    expect(page.locator(LOSS)).to_have_attribute("data-points", "1")
    service.stop()
    try:
        expect(connection).to_have_attribute("data-state", "reconnecting")
        attempt.metric(2, loss=0.5)
        attempt.log("meanwhile")
    finally:
        service.start()
    expect(connection).to_have_attribute("data-state", "live")
    attempt.metric(3, loss=0.25)
    expect(page.locator(LOSS)).to_have_attribute("data-points", "3")
    expect(page.locator(".line .text")).to_have_text(["before", "meanwhile"])


@pytest.mark.slow
def test_what_the_stream_lost_is_fetched_again(
    page: Page, fleet: Fleet, service: Service, complaints: Complaints, redis: Redis
) -> None:
    complaints.expected = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET")
    attempt = fleet.run(train_spec())
    attempt.metric(1, loss=1.0)
    page.goto(f"/jobs/{attempt.job_id}")
    expect(page.locator(LOSS)).to_have_attribute("data-points", "1")
    service.stop()
    try:
        record = fleet.data.job(attempt.job_id).attempt(1) / "events.jsonl"
        record.parent.mkdir(parents=True)
        metrics = [event("metric", 0, step=step, values={"loss": 1 / step}) for step in range(1, 7)]
        record.write_text("".join(f"{json.dumps(metric)}\n" for metric in metrics))
        progress: ProgressEvent = event("progress", 0, done=42, total=100, unit="steps")  # type: ignore[assignment]
        attempt.emit(progress, *metrics[1:], progress=progress)
        redis.xtrim(f"trivet:job:{attempt.job_id}:events", maxlen=2, approximate=False)
    finally:
        service.start()
    expect(page.locator(LOSS)).to_have_attribute("data-points", "6")
    expect(page).to_have_title(re.compile("^42"))


@pytest.mark.slow
def test_one_connection_serves_a_whole_page(page: Page, fleet: Fleet) -> None:
    attempt = fleet.run(train_spec())
    streams: list[str] = []
    page.on("request", lambda request: streams.append(request.url) if request.resource_type == "eventsource" else None)
    page.goto(f"/jobs/{attempt.job_id}")
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    attempt.metric(1, loss=1.0)
    expect(page.locator(LOSS)).to_have_attribute("data-points", "1")
    assert len(streams) == 1
    attempt.succeed({"loss": 1.0})
    expect(page.locator("#connection")).to_have_attribute("data-state", "ended")
    expect(page.locator("#result")).to_contain_text("Loss", ignore_case=True)
    assert len(streams) == 1
