"""Measures how soon pages of the dashboard show their content, in a real browser, with large data.

A broker, an API in a process of its own, jobs that are only on record, and Chromium. Quiet cores: ``taskset -c 0,1``.

    python benchmarks/dashboard.py [--steps 20000] [--jobs 1000] [--points 400] [--repeat 3]

``chart``: a training with ``steps`` recorded steps of eight metrics, from the address to the frame after the first
curve has its points, with the thinned curves of its attempt and without. ``list``: ``jobs`` jobs, to the first row.
``compare``: as many runs of ``points`` recorded steps each, to the first curves; and the API's answer alone.
``restart``: a page stays open while the API is stopped and started again, from the first answer of the new one to a
page that says so. Milliseconds of each repetition: the first one finds nothing kept. ``shift`` is the browser's
measure of layout shift, at most 0.1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from api_process import ApiProcess, api_with_broker
from playwright.sync_api import Page, expect, sync_playwright
from streams import SPEC

from service.jobs.events import rank_file
from service.jobs.events.curves import CurveKeeper
from service.jobs.files import DataLayout
from service.jobs.kinds.registry import spec_adapter
from service.jobs.records import AttemptRef, PartOutcome
from service.jobs.store import HostReport, Store, StoreLimits

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from ensure_chromium import find_chromium

LIMIT_MS = 240_000
PER_CALL = 100
"""Jobs that one comparison names at most."""
NAMES = ("loss", "lr", "grad_norm", "samples_per_s", "step_ms", "data_wait_fraction", "tflops", "peak_memory_gib")
VARIANTS = 10
"""Records that differ: other runs link one of these."""
WATCH = """
window.shift = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
}).observe({ type: "layout-shift", buffered: true });
window.shown = (wanted) => new Promise((resolve) => {
  const painted = () => requestAnimationFrame(() => resolve(performance.now()));
  const look = () => requestAnimationFrame(document.querySelector(wanted) ? painted : look);
  look();
});
"""


@dataclass
class Dashboard:
    """A store, and an API that may be stopped and started."""

    store: Store
    layout: DataLayout
    api: ApiProcess
    thinned: bool = True
    """Whether attempts leave thinned curves beside their record."""
    written: dict[tuple[int, int, bool], Path] = field(default_factory=dict)

    def trained(self, count: int, steps: int) -> list[str]:
        """Return the ids of trainings that have ended, each with so many steps on record."""
        ids = []
        for seed in range(count):
            job, _ = self.store.jobs.submit(spec_adapter.validate_python({**SPEC, "seed": seed}), "admin")
            self.store.attempts.place()
            job = self.store.jobs.get(job.id)
            ref = AttemptRef(job.id, job.attempt, job.placement[0].host)
            self.store.attempts.claim(ref, "bench")
            self._record(ref, steps, seed)
            self.store.attempts.finish(ref, PartOutcome("succeeded", result={"loss": 0.1}))
            ids.append(job.id)
        return ids

    def _record(self, ref: AttemptRef, steps: int, seed: int) -> None:
        """Write the record of an attempt, or link one of ``VARIANTS`` that was written before."""
        folder = self.layout.job(ref.job_id).attempt(ref.attempt)
        folder.mkdir(parents=True)
        known = self.written.setdefault((steps, seed % VARIANTS, self.thinned), folder)
        if known != folder:
            for path in known.iterdir():
                (folder / path.name).hardlink_to(path)
            return
        curves, record = CurveKeeper(), rank_file(folder, 0)
        with record.open("w", encoding="utf-8") as file:
            for step in range(1, steps + 1):
                value = (1 + seed % VARIANTS) / step + 0.1 * math.sin(step)
                event = {"type": "metric", "step": step, "time": 1.7e9 + step, "rank": 0}
                event["values"] = dict.fromkeys(NAMES, value)
                file.write(json.dumps(event) + "\n")
                curves.take(event)
        if self.thinned:
            curves.write(folder, 0, {record.name: record.stat().st_size})


@contextlib.contextmanager
def serving() -> Iterator[Dashboard]:
    with api_with_broker(limits=StoreLimits(lease_s=3600, heartbeat_s=3600)) as (store, layout, api):
        store.hosts.beat(HostReport("paper", "10.0.0.7", (), 4, {"trivet": "0", "torch": "0", "python": "0"}))
        api.start()
        yield Dashboard(store, layout, api)


def timed(page: Page, name: str, address: str, wanted: str, repeat: int) -> None:
    """Open an address repeatedly; print when ``wanted`` was painted, and the layout shift."""
    found, shifts = [], []
    for _ in range(repeat):
        page.goto("about:blank")
        page.goto(address, wait_until="commit")
        found.append(page.evaluate("(wanted) => window.shown(wanted)", wanted))
        page.wait_for_load_state("networkidle")
        shifts.append(page.evaluate("window.shift"))
    print(name, [round(each) for each in found], "ms; shift", round(max(shifts), 3), flush=True)


def answered(dashboard: Dashboard, key: str, ids: list[str], repeat: int) -> None:
    """Time the API's answers to a comparison, one after the other, without the drawing of them."""
    for _ in range(repeat):
        began, size = time.monotonic(), 0
        for first in range(0, len(ids), PER_CALL):
            named = ",".join(ids[first : first + PER_CALL])
            address = f"{dashboard.api.url}/v1/jobs:metrics?ids={named}&names=loss&max_points=100"
            request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"})
            with urllib.request.urlopen(request, timeout=LIMIT_MS / 1000) as answer:
                size += len(answer.read())
        print(f"compare, answers alone: {1000 * (time.monotonic() - began):.0f} ms, {size / 1e6:.1f} MB", flush=True)


def restarted(page: Page, dashboard: Dashboard) -> None:
    """Stop and start the API under the list of jobs; the page must say so, and then be connected again."""
    page.goto("/")
    status = page.locator("#connection")
    expect(status).to_have_attribute("data-state", "live", timeout=LIMIT_MS)
    dashboard.api.stop()
    expect(status).not_to_have_attribute("data-state", "live", timeout=LIMIT_MS)
    dashboard.api.start()
    began = time.monotonic()
    expect(status).to_have_attribute("data-state", "live", timeout=LIMIT_MS)
    print(f"restart: connected {1000 * (time.monotonic() - began):.0f} ms after the API answered", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--steps", 20_000), ("--jobs", 1000), ("--points", 400), ("--repeat", 3)):
        parser.add_argument(name, type=int, default=default)
    asked = parser.parse_args()
    print(platform.processor() or platform.machine(), "load", os.getloadavg()[0])
    with serving() as dashboard, sync_playwright() as playwright:
        key = dashboard.store.keys.create("admin", ("admin",))[1]
        (long,) = dashboard.trained(1, asked.steps)
        dashboard.thinned = False
        (recorded,) = dashboard.trained(1, asked.steps)
        dashboard.thinned = True
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_context(base_url=dashboard.api.url, viewport={"width": 1280, "height": 900}).new_page()
        page.set_default_timeout(LIMIT_MS)
        page.add_init_script(WATCH)
        page.goto("/login")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/")
        for words, job in (("", long), (", from the record", recorded)):
            name = f"chart of {asked.steps} steps{words}"
            timed(page, name, f"/jobs/{job}", "#metrics canvas[data-points]", asked.repeat)
        ids = dashboard.trained(asked.jobs, asked.points)
        timed(page, f"list of {asked.jobs} jobs", "/", "table.jobs tbody a[href^='/jobs/']", asked.repeat)
        answered(dashboard, key, ids, asked.repeat)
        compared = f"/compare?ids={','.join(ids)}"
        timed(page, f"{asked.jobs} runs compared", compared, "canvas[data-points]", asked.repeat)
        restarted(page, dashboard)
        browser.close()


if __name__ == "__main__":
    main()
