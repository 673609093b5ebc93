"""The API reference at ``/docs``: readable without signing in, from this origin only, under the content policy."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from dashboard_service import Service
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def test_a_visitor_reads_every_operation_from_this_origin_alone(visitor: Page, service: Service) -> None:
    asked: list[str] = []
    visitor.on("request", lambda request: asked.append(request.url))
    visitor.goto("/docs")
    expect(visitor.locator("#operations-jobs-submit_job")).to_be_visible()
    document = visitor.evaluate("fetch('/openapi.json').then((answer) => answer.json())")
    operations = sum(len(operations) for operations in document["paths"].values())
    expect(visitor.locator(".opblock:not([id^=operations-webhooks-job_webhook])")).to_have_count(operations)
    hosts = {urlsplit(url).netloc for url in asked if not url.startswith("data:")}
    assert hosts == {urlsplit(service.url).netloc}
    expect(visitor.get_by_role("navigation", name="Main")).to_have_count(0)


@pytest.mark.slow
def test_an_operation_is_tried_by_who_is_signed_in(page: Page) -> None:
    page.goto("/docs")
    expect(page.get_by_role("link", name="API", exact=True)).to_have_attribute("aria-current", "page")
    operation = page.locator("#operations-kinds-list_kinds")
    operation.locator(".opblock-summary-control").click()
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_role("button", name="Execute").click()
    expect(operation.locator(".live-responses-table .response-col_status")).to_have_text(["Code", "200"])
    expect(operation.locator(".curl-command")).not_to_contain_text("X-Trivet-Session")
