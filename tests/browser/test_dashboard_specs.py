"""The page of every field of a spec."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from service.jobs.kinds.registry import KINDS

pytestmark = pytest.mark.browser


def test_every_field_of_a_kind_is_listed_with_what_it_is(page: Page) -> None:
    schema = KINDS.declaration("verify").config.model_json_schema()
    page.goto("/specs#verify")
    fields = page.locator("#fields [data-path]")
    expect(page.locator("[data-path='property.robustness.eps']")).to_contain_text("the radius of the ball")
    expect(page.locator("[data-path='property.robustness.eps']")).to_contain_text("needed")
    for name in schema["properties"]:
        expect(page.locator(f"[data-path='{name}']")).to_have_count(1)
    assert [text for text in fields.locator("td:last-child").all_inner_texts() if not text] == []
    page.get_by_role("button", name="train", exact=True).click()
    expect(page.locator("[data-path='optimizer.lr']").first).to_contain_text("number > 0")  # each optimizer has one
    page.get_by_label("Find a field").fill("tokenizer")
    expect(page.locator("[data-path='data.tokenizer']")).to_be_visible()
    expect(page.locator("[data-path='optimizer.lr']")).to_have_count(0)
