"""Who is let in and who is not: signing in and out, ends of sessions, neighbours of the host."""

from __future__ import annotations

import re

import httpx2
import pytest
from dashboard_service import Complaints, Service, shown
from http_receiver import Reply, Request, listening
from lanes import slow_but_for
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def test_signing_in_and_out(visitor: Page, key: str, complaints: Complaints) -> None:
    complaints.expected = ("401",)
    visitor.goto("/hosts")
    expect(visitor).to_have_url(re.compile(r"/login\?next=%2Fhosts$"))
    visitor.get_by_label("API key").fill("tvt_nobody_nothing")
    visitor.keyboard.press("Enter")
    expect(visitor.get_by_role("alert")).to_contain_text("key is unknown")
    visitor.get_by_label("API key").fill(key)
    visitor.get_by_role("button", name="Sign in").click()
    expect(visitor).to_have_url(re.compile(r"/hosts$"))
    cookie = next(cookie for cookie in visitor.context.cookies() if cookie["name"] == "trivet_session")
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    visitor.get_by_role("button", name="Sign out").click()
    expect(visitor).to_have_url(re.compile(r"/login$"))


@pytest.mark.slow
def test_what_is_refused_while_signing_out_does_not_ask_to_come_back(page: Page, complaints: Complaints) -> None:
    """The page asks on while the service answers: its next question may be refused before that."""
    complaints.expected = ("401",)
    shown(page, "/hosts")
    page.evaluate("""async () => {
        const form = document.querySelector('form[action="/logout"]');
        form.addEventListener("submit", (event) => event.preventDefault());
        form.requestSubmit();
        const module = performance.getEntriesByType("resource").find((each) => each.name.endsWith("/ui/api.js"));
        (await import(module.name)).signIn();
    }""")
    page.context.clear_cookies()
    page.wait_for_timeout(100)
    assert page.url.endswith("/hosts")


@pytest.mark.parametrize(
    "target",
    slow_but_for(
        ["/\t/example.org", "https://example.org/", "/\\example.org", "javascript:alert(1)"], "/\t/example.org"
    ),
)
def test_after_signing_in_nobody_is_sent_to_another_site(visitor: Page, key: str, target: str) -> None:
    visitor.goto("/login")
    visitor.evaluate("(target) => history.replaceState(null, '', `/login?next=${encodeURIComponent(target)}`)", target)
    visitor.get_by_label("API key").fill(key)
    visitor.get_by_role("button", name="Sign in").click()
    expect(visitor.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()


@pytest.mark.slow
def test_a_revoked_key_leads_back_to_the_sign_in_page(page: Page, service: Service, complaints: Complaints) -> None:
    complaints.expected = ("401",)
    shown(page, "/")
    for known in service.store.keys.list():
        service.store.keys.revoke(known.id)
    expect(page).to_have_url(re.compile(r"/login\?next=%2F$"))


@pytest.mark.slow
def test_what_another_port_of_the_host_gets_to_see_admits_nobody(
    page: Page, service: Service, complaints: Complaints
) -> None:
    complaints.expected = ("favicon",)
    seen: list[str] = []

    def greet(request: Request) -> Reply:
        seen.append(request.headers.get("cookie", ""))
        return Reply(content=b"<p>hello</p>", media_type="text/html")

    shown(page, "/")
    with listening(greet) as neighbour:
        page.goto(neighbour)
    assert seen[0].startswith("trivet_session="), "the browser sends it: cookies know no ports"
    for path in ("/v1/jobs", "/v1/keys", "/v1/events"):
        assert httpx2.get(f"{service.url}{path}", headers={"Cookie": seen[0]}, timeout=300).status_code == 401


@pytest.mark.slow
def test_signing_out_in_one_tab_ends_the_others(page: Page, complaints: Complaints) -> None:
    complaints.expected = ("401",)
    shown(page, "/")
    other = page.context.new_page()
    other.goto("/")
    other.get_by_role("button", name="Sign out").click()
    expect(other).to_have_url(re.compile(r"/login$"))
    expect(page).to_have_url(re.compile(r"/login\?next=%2F$"))
