"""The page of a sweep: its jobs with their values, as they go."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest
from dashboard_service import Service
from fleet import Fleet, train_spec
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def test_a_sweeps_page_is_a_table_of_its_jobs_by_their_values_the_best_first(
    page: Page, fleet: Fleet, service: Service, key: str
) -> None:
    sweep: dict[str, Any] = {"grid": {"optimizer.lr": [0.1, 0.2]}, "best": {"metric": "loss", "mode": "min"}}
    sweep["stop"] = {"rule": "halving", "metric": "eval_loss", "mode": "min", "factor": 2, "first": 10}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx2.post(
        f"{service.url}/v1/jobs", json=train_spec(sweep=sweep, evaluate={"every": 10}), headers=headers, timeout=300
    )
    assert answer.status_code == 201, answer.text
    second, first = (job.id for job in fleet.store.jobs.list().items if job.sweep)
    page.goto(f"/jobs/{answer.json()['id']}")
    rows = page.locator("#sweep tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.get_by_role("link")).to_have_text(["lr=0.1", "lr=0.2"])
    ahead = fleet.begin(first)
    ahead.metric(10, eval_loss=0.25)
    ahead.succeed({"loss": 0.5})
    expect(rows.nth(0)).to_contain_text("succeeded")
    expect(page.locator("#sweep .note")).to_have_text("1 starting, 1 succeeded")
    rows.nth(1).get_by_role("link").click()
    expect(page.locator("#details")).to_contain_text(answer.json()["id"])
    worse = fleet.begin(second)
    worse.metric(10, eval_loss=0.5)
    judged = fleet.store.sweeps.stop_early()
    assert judged is not None
    (why,) = (each.reason for each in judged[1])
    worse.succeed({"loss": 0.125, "steps": 12, "ended_early": why})
    expect(page.locator("main .reason").first).to_have_text(why)
    page.go_back()
    expect(page.locator("#sweep .note")).to_have_text("2 succeeded")
    expect(page.locator(".facts-line")).to_contain_text(re.compile(r"\d\s(ms|s|min)"))  # from its submission to its end
    expect(rows.get_by_role("link")).to_have_text(["lr=0.2", "lr=0.1"])
    expect(rows.nth(0).locator("strong")).to_have_text("0.1250")
    expect(rows.nth(0).get_by_title(why)).to_have_text("succeeded at step 12")
