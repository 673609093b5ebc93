"""The page of API keys: an operator makes one, sees who has which, and ends one."""

from __future__ import annotations

import pytest
from dashboard_service import Complaints, Service
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def test_a_key_is_made_shown_once_and_revoked(page: Page, service: Service, complaints: Complaints) -> None:
    complaints.expected = ("422", "409")
    page.goto("/")
    page.get_by_role("link", name="Keys").click()
    expect(page.locator("#rows tr")).to_have_count(1)
    page.get_by_label("Name").fill("ann")
    page.get_by_label("Works for").fill("30")
    page.get_by_label("Project").fill("No such")
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_role("alert")).to_contain_text("project")
    page.get_by_label("Project").fill("default")
    page.get_by_role("button", name="Create key").click()
    secret = page.locator("#secret code").inner_text()
    made = service.store.keys.verify(secret)
    assert made is not None
    assert (made.name, made.scopes, made.project) == ("ann", ("submit",), "default")
    assert made.expires_at is not None
    row = page.locator(f"[data-key='{made.id}']")
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke the key").click()
    expect(row).to_have_count(0)
    assert service.store.keys.verify(secret) is None
    page.reload()
    expect(page.locator("#rows tr")).to_have_count(1)
    assert secret not in page.content()
    page.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke the key").click()
    expect(page.get_by_text("a key cannot revoke itself")).to_be_visible()
