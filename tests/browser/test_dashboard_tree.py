"""The tree of what a search split, on the page of a verification job."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import Fleet, verify_spec
from playwright.sync_api import Page, expect
from split_trees import tree_event, tree_of
from waiting import eventually

pytestmark = pytest.mark.browser


def test_what_hides_stuck_domains_is_not_drawn_as_verified(run: Any) -> None:
    hiding = {"counterexample": None, "below": [4], "open_below": [0], "state": ["split"]}
    assert run("tree", "stateOf", hiding | {"stuck_below": [1]}, 0) == "stuck"
    assert run("tree", "stateOf", hiding | {"stuck_below": [0]}, 0) == run("tree", "stateOf", hiding, 0) == "verified"


def opened(page: Page, fleet: Fleet, *events: Any) -> None:
    attempt = fleet.run(verify_spec(method="beta-crown"))
    attempt.record(*events)
    attempt.succeed()
    page.goto(f"/jobs/{attempt.job_id}")


def test_a_tree_is_walked_by_keys_and_looked_at_closer(page: Page, fleet: Fleet) -> None:
    tree = tree_of(3)
    tree.mark([1.0, -1.0, -1.0] + [0.0] * 9, [0])
    opened(page, fleet, tree_event(2, tree, domains=12))
    drawing = page.locator("#tree svg")
    expect(page.locator("#tree .note")).to_contain_text("instance 2 · 12 domains")
    expect(drawing.locator("g")).to_have_count(len(tree.nodes))
    drawing.focus()
    for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    said = page.locator("#tree .said")
    expect(said).to_contain_text("relu_0 [0] ≤ 0: split")
    page.keyboard.press("Enter")
    above, closer = drawing.locator("[data-index='0'] rect"), drawing.locator("[data-chosen] rect")
    eventually(lambda: above.get_attribute("width") == closer.get_attribute("width"))
    page.get_by_role("button", name="whole tree").click()
    eventually(lambda: above.get_attribute("width") != closer.get_attribute("width"))


@pytest.mark.slow
def test_the_tree_of_the_instance_that_one_looks_at_is_drawn(page: Page, fleet: Fleet) -> None:
    opened(page, fleet, tree_event(1, tree_of(2)), tree_event(7, tree_of(4, most=9), domains=40))
    expect(page.locator("#tree .unit")).to_contain_text("the first 9 domains are drawn")
    page.get_by_label("Instance whose tree is drawn").select_option("1")
    expect(page.locator("#tree svg g")).to_have_count(7)


@pytest.mark.slow
def test_a_phone_has_the_whole_tree_and_none_is_drawn_where_nothing_was_split(page: Page, fleet: Fleet) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    opened(page, fleet, tree_event(0, tree_of(6)))
    drawing = page.locator("#tree svg")
    expect(drawing).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    opened(page, fleet)
    expect(page.locator("#tree")).to_be_hidden()
