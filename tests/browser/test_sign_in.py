"""Signing in through an OpenID Connect provider, in a real browser; the provider is a package's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import oidc_provider_mock
import pytest
import werkzeug.serving
from dashboard_service import Complaints, Service
from http_receiver import answering
from playwright.sync_api import Browser, Page, Route, expect
from pydantic import SecretStr

from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.settings import Settings
from service.jobs.store import Store

pytestmark = pytest.mark.browser

PEOPLE = [
    oidc_provider_mock.User(
        sub="ann", claims={"email": "ann@example.org", "email_verified": True, "groups": ["vision-team"]}
    ),
    oidc_provider_mock.User(sub="eve", claims={"email": "eve@example.org", "email_verified": True, "groups": []}),
]


@contextlib.contextmanager
def providing() -> Iterator[str]:
    """Run the package's provider; its address."""
    app = oidc_provider_mock.app(user_claims=PEOPLE, require_nonce=True)
    server = werkzeug.serving.make_server("127.0.0.1", 0, app, threaded=True)
    with answering(server) as url:
        yield url


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with a broker, a data folder and a provider of its own."""
    folder = tmp_path_factory.mktemp("sign-in")
    with providing() as issuer, EmbeddedBroker.start(folder / "broker", fsync="everysec") as broker:
        (folder / "data").mkdir()
        settings = Settings(
            data=folder / "data",
            redis_url=SecretStr(broker.url),
            oidc_issuer=issuer,
            oidc_client_id="trivet",
            oidc_client_secret=SecretStr("secret"),
            oidc_roles="vision-team=vision:submitter",
            oidc_name="Example ID",
        )
        store = Store.connect(broker.url, settings.layout, settings.store_limits)
        service = Service(settings, store)
        store.projects.create("vision")
        service.start()
        yield service
        service.stop()
        store.close()


@pytest.fixture
def person(browser: Browser, service: Service, complaints: Complaints) -> Iterator[Page]:
    """A page of somebody who is not signed in anywhere. The provider's pages get no style sheet from elsewhere."""
    with contextlib.closing(browser.new_context(base_url=service.url)) as context:
        context.set_default_timeout(300_000)
        context.route(re.compile("^https:"), _nothing)
        page = context.new_page()
        complaints.listen(page)
        yield page
        assert complaints.found == []


def _nothing(route: Route) -> None:
    route.fulfill(body="", content_type="text/css")


@pytest.mark.slow
def test_a_person_comes_in_through_the_provider_and_goes_where_they_wanted(person: Page, service: Service) -> None:
    person.goto("/hosts")
    person.get_by_role("button", name="Sign in with Example ID").click()
    person.get_by_role("button", name="ann").click()
    expect(person).to_have_url(f"{service.url}/hosts")
    expect(person.get_by_role("heading", name="Hosts")).to_be_visible()
    (key,) = service.store.keys.list()
    assert (key.name, key.project, key.holder) == ("ann@example.org", "vision", "person")
    person.reload()
    expect(person).to_have_url(f"{service.url}/hosts")
    service.store.keys.revoke(key.id)


@pytest.mark.slow
def test_whoever_has_no_role_here_is_told(person: Page, service: Service, complaints: Complaints) -> None:
    complaints.expected = ("401",)
    person.goto("/login")
    person.get_by_role("button", name="Sign in with Example ID").click()
    person.get_by_role("button", name="eve").click()
    expect(person.get_by_role("alert")).to_contain_text("none of your groups has a role here")
    expect(person).to_have_url(f"{service.url}/login/callback")
    assert service.store.keys.list() == []


@pytest.mark.slow
def test_whoever_says_no_at_the_provider_may_try_again(person: Page, service: Service, complaints: Complaints) -> None:
    complaints.expected = ("401",)
    person.goto("/login?next=%2F%2Fevil.example")
    person.get_by_role("button", name="Sign in with Example ID").click()
    person.wait_for_url(re.compile("state="))
    (state,) = parse_qs(urlsplit(person.url).query)["state"]
    person.goto(f"/login/callback?error=access_denied&state={state}")  # the package's own answer lacks the state
    expect(person.get_by_role("alert")).to_contain_text("access_denied")
    person.get_by_role("button", name="Sign in with Example ID").click()
    person.get_by_role("button", name="ann").first.click()
    expect(person).to_have_url(f"{service.url}/")
