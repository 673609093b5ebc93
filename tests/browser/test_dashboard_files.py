"""The page of uploads: found by name, with what uses them, and deleted."""

from __future__ import annotations

import io

import pytest
from fleet import Fleet, paired_spec
from playwright.sync_api import Page, expect

from service.jobs.store import UploadedBy

pytestmark = pytest.mark.browser


def test_uploads_have_their_names_and_users_and_are_deleted(page: Page, fleet: Fleet) -> None:
    by = UploadedBy("default", fleet.owner)
    plain = fleet.store.files.add(
        io.BytesIO(b"weights"), "application/octet-stream", name="model.safetensors", uploader=by
    )
    user = fleet.submit(paired_spec(fleet.store))
    page.goto("/files")
    expect(page.locator("#summary")).to_have_text("2 files")
    row = page.locator(f"[data-file='{plain.id}']")
    expect(row).to_contain_text("model.safetensors")
    needed = page.locator("#rows tr").filter(has_text="in use")
    # In one element, which narrow screens keep together.
    expect(needed.locator("td > span").get_by_role("link")).to_have_attribute("href", f"/jobs/{user.id}")
    expect(needed.get_by_role("button", name="Delete")).to_be_disabled()
    row.get_by_role("button", name="Delete model.safetensors").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete the file").click()
    expect(row).to_have_count(0)
    expect(page.locator("#summary")).to_have_text("1 file")
