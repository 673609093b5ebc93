"""What is on a page stays where it is while the rest comes: the browser's own measure of shifts is 0.1 at most."""

from __future__ import annotations

import pytest
from ended_pages import ended_pages
from fleet import Fleet
from playwright.sync_api import Page, expect

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
    return ended_pages(fleet)


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
