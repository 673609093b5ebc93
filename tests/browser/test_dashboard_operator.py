"""The pages of an operator: the queue, projects, alerts, the audit log."""

from __future__ import annotations

import re

import pytest
from fleet import Fleet, train_spec
from playwright.sync_api import Page, expect

from service.jobs.kinds.registry import spec_adapter

pytestmark = pytest.mark.browser

FIRING = {
    "name": "TrivetHostSilent", "severity": "critical", "state": "firing", "labels": {"host": "cpu-a"}, "value": 1.0,
    "since": "2026-01-01T00:00:00Z", "meaning": "A host is silent.", "action": "Look at it.", "expression": "up == 0",
}  # fmt: skip


@pytest.mark.slow
def test_the_queue_is_in_its_order_and_names_hosts_that_take_no_work(page: Page, fleet: Fleet) -> None:
    page.goto("/queue")
    expect(page.get_by_text("Nothing waits")).to_be_visible()
    fleet.run(train_spec("holder", parallel={"dp_shard": 4}))
    late = fleet.submit(train_spec("late"))
    fleet.submit(train_spec("urgent", priority=5))
    fleet.submit(train_spec("dependent", after=[late.id]))
    rows = page.locator("#queue tbody tr")
    expect(rows).to_have_count(3)
    expect(page.locator("#queue .note")).to_have_text("2 wait for devices, 1 for other jobs")
    expect(rows.locator("td:first-child")).to_have_text(["1", "2", "–"])
    expect(rows.locator("a")).to_have_text(["urgent", "late", "dependent"])
    expect(rows.last.locator("td").last).to_have_text("after those jobs")
    expect(page.locator("#limits li")).to_have_count(0)
    fleet.store.hosts.drain("cpu-a")
    fleet.store.attempts.place()
    expect(page.locator("#limits li")).to_contain_text(["Host cpu-a is draining"])
    expect(rows.nth(1)).to_contain_text("host cpu-a is draining")


def test_projects_have_members_quotas_and_use(page: Page, fleet: Fleet) -> None:
    store = fleet.store
    store.projects.create("vision", "cars that see")
    store.projects.change("vision", {"devices": 4})
    store.projects.set_member("vision", "ann", "submitter")
    spec = spec_adapter.validate_python(train_spec(parallel={"dp_shard": 2}))
    fleet.begin(store.jobs.submit(spec, "ann", project="vision")[0].id)
    page.goto("/projects")
    panel = page.locator("[data-project='vision']")
    expect(panel).to_contain_text("ann submitter")
    expect(panel.get_by_role("row", name="Devices held").locator("td")).to_have_text(["2", "4", ""])
    expect(panel.get_by_label(re.compile("Devices held: 50"))).to_have_count(1)
    expect(page.locator("[data-project='default']")).to_contain_text("Whoever has a key of it.")


def test_alerts_and_the_audit_log_are_on_pages(page: Page, fleet: Fleet, key: str) -> None:
    page.request.post("/v1/hosts/cpu-a/drain", headers={"Authorization": f"Bearer {key}"})
    page.goto("/audit?action=host.drain")
    row = page.locator("#rows tr")
    expect(row.locator("td")).to_have_text([re.compile("^20"), "admin", "host.drain", "cpu-a", "127.0.0.1"])
    expect(row.locator("td").first).to_have_css("white-space", "nowrap")  # a time is one line, however long the rest is
    page.get_by_label("Action").select_option("key.create")
    expect(row).to_have_count(0)
    page.route("**/v1/alerts", lambda route: route.fulfill(json={"items": [FIRING]}))
    page.get_by_role("link", name="Alerts").click()
    expect(page.locator("#summary")).to_have_text("1 alert firing")
    expect(page.get_by_role("region", name="TrivetHostSilent")).to_contain_text("Look at it.")
