"""What is on a page stays where it is while the rest comes: the browser's own measure of shifts is 0.1 at most."""

from __future__ import annotations

import json

import pytest
from compile_report import REPORT
from fleet import Fleet, compile_spec, submit_sweep, train_spec, verify_spec
from playwright.sync_api import Page, expect

from service.jobs.records import JobError
from service.jobs.store import JobFilter

pytestmark = [pytest.mark.browser, pytest.mark.slow]

WATCH = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    if (entry.hadRecentInput) continue;
    const named = (node) => (node?.closest ? node : node?.parentElement)?.closest("[id]")?.id ?? "";
    const moved = entry.sources.map(({ node }) => named(node));
    window.shifts.push([entry.value, moved.join(" ")]);
  }
}).observe({ type: "layout-shift", buffered: true });
"""
MOST = 0.1


@pytest.fixture
def addresses(fleet: Fleet) -> dict[str, str]:
    """A page of every kind; of jobs, ended ones."""
    train = fleet.run(train_spec(labels={"team": "vision"}, evaluate={"every": 10}))
    for step in range(1, 101):
        values = {
            "loss": 1 / step,
            "lr": 0.001,
            "grad_norm": 1.0,
            "step_ms": 3.0,
            "samples_per_s": 100.0,
            "tflops": 0.1,
        }
        train.metric(step, of=100, **values, **({"eval_loss": 1 / step} if step % 10 == 0 else {}))
    for line in range(200):
        train.log(f"step {line}")
    train.artifact("model.safetensors", b"x" * 2000)
    train.succeed({"loss": 0.01, "eval_loss": 0.01, "eval_accuracy": 0.99})
    verify = fleet.run(verify_spec(model={"job": train.job_id}))
    for index in range(32):
        verify.bound(index, 0.5 - index / 40, "verified" if index < 20 else "unknown")
    verify.succeed({"verdicts": {"verified": 20, "falsified": 0, "unknown": 12, "timeout": 0}, "instances": 32})
    compiled = fleet.run(compile_spec())
    compiled.artifact("report.json", json.dumps(REPORT).encode(), "application/json")
    compiled.succeed({"gate": {"train": "eager"}})
    failed = fleet.run(train_spec("broken"))
    failed.log("Traceback (most recent call last):", rank=1, stream="stderr")
    failed.fail(JobError(type="ValueError", message="no", rank=1))
    sweep = submit_sweep(fleet, "seeds", 4)
    for job in fleet.store.jobs.list(JobFilter(sweep=sweep)).items:
        fleet.begin(job.id).succeed({"loss": 0.1})
    jobs = {
        "train": train.job_id,
        "verify": verify.job_id,
        "compile": compiled.job_id,
        "failed": failed.job_id,
        "sweep": sweep,
    }
    lists = {name: f"/{name}" for name in ("hosts", "keys", "files", "specs", "submit")}
    compared = {"compare": f"/compare?ids={train.job_id},{failed.job_id},{verify.job_id}"}
    return {"jobs": "/", **lists, **compared, **{name: f"/jobs/{job_id}" for name, job_id in jobs.items()}}


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_do_not_shift_while_they_load(page: Page, addresses: dict[str, str], width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.add_init_script(WATCH)
    told = {}
    for name, path in addresses.items():
        page.goto(path)
        expect(page.locator("main h1").first).to_be_visible()
        expect(page.locator(".loading")).to_have_count(0)
        page.wait_for_load_state("networkidle")
        told[name] = page.evaluate("window.shifts")
    beyond = [f"{name}: {found}" for name, found in told.items() if sum(value for value, _ in found) > MOST]
    assert not beyond, "\n".join(beyond)
