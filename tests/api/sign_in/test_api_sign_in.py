"""Signing in through a provider: a real one over HTTP, which tells the truth, and then does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import jwt
import orjson
import pytest
from digits import digits_job
from fastapi import FastAPI
from fastapi.testclient import TestClient
from lanes import first_fast, slow_but_for
from oidc_provider import CLIENT_ID, CLIENT_SECRET, LocalProvider, SigningKey, providing
from pydantic import SecretStr, ValidationError

from api.callers import attach, context_of
from api.callers.security import FLOW_COOKIE, PAGE_HEADER, SESSION_COOKIE
from api.main import create_app
from api.sign_in.provider import OpenIdProvider, RelyingParty
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.settings import Settings
from service.jobs.store import AuditFilter, Store

ANN = {"email": "ann@example.org", "email_verified": True, "groups": ["vision-team"]}
PAGES = {"Sec-Fetch-Site": "same-origin"}
Answer = httpx2.Response


@dataclass(frozen=True)
class Site:
    """A service, its provider, and a browser."""

    provider: LocalProvider
    app: FastAPI
    browser: TestClient

    @property
    def store(self) -> Store:
        return context_of(self.app).store

    def begin(self) -> dict[str, str]:
        """Begin a sign-in and sign in at the provider; return what the browser comes back with."""
        answer = self.browser.post("/login/oidc", headers=PAGES)
        assert answer.status_code == 200, answer.text
        return self.provider.authorize(answer.json()["url"])

    def finish(self, came_back: dict[str, str]) -> Answer:
        return self.browser.post("/login/oidc/callback", data=came_back, headers=PAGES)

    def sign_in(self, **claims: Any) -> Answer:
        self.provider.claims = ANN | claims
        return self.finish(self.begin())

    def recorded(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in self.store.audit.lines(AuditFilter())]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A service with a broker and a data folder of its own."""
    folder = tmp_path_factory.mktemp("sign-in")
    with providing() as provider, EmbeddedBroker.start(folder / "broker", fsync="everysec") as broker:
        (folder / "data").mkdir()
        settings = Settings(
            data=folder / "data",
            redis_url=SecretStr(broker.url),
            allowed_hosts="testserver",
            oidc_issuer=provider.issuer,
            oidc_client_id=CLIENT_ID,
            oidc_client_secret=SecretStr(CLIENT_SECRET),
            oidc_roles="ops=operator; vision-team=vision:submitter; readers=vision:viewer; "
            "vision-leads=vision:maintainer; speech-team=speech:viewer; gone=gone:viewer",
        )
        app = create_app(settings)
        with TestClient(app, raise_server_exceptions=False) as browser:
            yield Site(provider, app, browser)


@pytest.fixture
def site(running: Site) -> Site:
    """The service with an empty database, a truthful provider of which it knows nothing, and a browser without
    cookies.
    """
    context = context_of(running.app)
    party = RelyingParty(running.provider.issuer, CLIENT_ID, CLIENT_SECRET, context.settings.oidc_scopes)
    attach(running.app, replace(context, provider=OpenIdProvider(party)))
    running.store.client.call("FLUSHALL")
    running.browser.cookies.clear()
    running.store.projects.create("vision")
    provider = running.provider
    provider.claims, provider.metadata, provider.token = {}, {}, None
    provider.published = []
    return running


def test_a_person_signs_in_and_owns_jobs(site: Site) -> None:
    answer = site.sign_in()
    assert answer.status_code == 200, answer.text
    page = {PAGE_HEADER: answer.json()["session"], **PAGES}
    job = site.browser.post("/v1/jobs", json=digits_job(), headers=page)
    assert job.status_code == 201, job.text
    assert (job.json()["owner"], job.json()["project"]) == ("ann@example.org", "vision")
    assert site.browser.get("/v1/keys", headers=page).status_code == 403
    actions = [(entry["action"], entry["actor"]) for entry in site.recorded()]
    assert actions[:2] == [("person.admit", "ann@example.org"), ("session.begin", "ann@example.org")]
    (key,) = site.store.keys.list()
    assert (key.holder, key.scopes, key.project) == ("person", ("submit",), "vision")


def test_cookies_are_out_of_reach_of_scripts_and_other_sites(site: Site) -> None:
    begun = site.browser.post("/login/oidc", headers=PAGES)
    flow = begun.headers["set-cookie"]
    site.provider.claims = ANN
    ended = site.finish(site.provider.authorize(begun.json()["url"]))
    session = next(text for text in ended.headers.get_list("set-cookie") if text.startswith(SESSION_COOKIE))
    for cookie in (flow, session):
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert FLOW_COOKIE not in site.browser.cookies


def test_groups_decide_what_a_person_may_do_and_the_next_sign_in_changes_it(site: Site) -> None:
    assert site.sign_in(groups=["ops"]).status_code == 200
    (key,) = site.store.keys.list()
    assert key.is_operator
    assert site.sign_in(groups=["readers", "x"]).status_code == 200
    (key,) = site.store.keys.list()
    assert (key.scopes, key.project) == (("read",), "vision")


def test_groups_make_members(site: Site) -> None:
    """A person is a member as any other: of one project at a time, in the role of the group."""
    site.store.projects.create("speech")
    site.sign_in(groups=["vision-leads"])
    assert [(each.name, each.role) for each in site.store.projects.members("vision")] == [(ANN["email"], "maintainer")]
    page = {PAGE_HEADER: site.sign_in(groups=["speech-team"]).json()["session"]}
    assert site.store.projects.members("vision") == []
    assert [each.role for each in site.store.projects.members("speech")] == ["viewer"]
    site.store.projects.remove_member("speech", str(ANN["email"]))
    assert site.browser.get("/v1/jobs", headers=page).status_code == 401


def test_a_project_that_is_gone_admits_nobody(site: Site) -> None:
    answer = site.sign_in(groups=["gone"])
    assert (answer.status_code, "no project gone" in answer.json()["detail"]) == (401, True)


def test_an_end_of_a_person_is_an_end_of_all_their_sessions(site: Site) -> None:
    page = {PAGE_HEADER: site.sign_in().json()["session"]}
    assert site.browser.get("/v1/jobs", headers=page).status_code == 200
    (key,) = site.store.keys.list()
    assert key.expires_at is not None
    site.store.keys.revoke(key.id)
    assert site.browser.get("/v1/jobs", headers=page).status_code == 401


def test_a_person_has_no_secret(site: Site) -> None:
    site.sign_in()
    (key,) = site.store.keys.list()
    for random in ("", "x", "0" * 43):
        assert site.store.keys.verify(f"tvt_{key.id}_{random}") is None
    with pytest.raises(Exception, match="no secret to rotate"):
        site.store.keys.rotate(key.id, grace_s=0)


def test_a_name_stays_with_the_person_who_had_it_first(site: Site) -> None:
    assert site.sign_in(sub="1").status_code == 200
    answer = site.sign_in(sub="2")
    assert answer.status_code == 401
    assert "another person's name" in answer.json()["detail"]
    assert site.sign_in(sub="1").status_code == 200


NOT_ADMITTED: dict[str, dict[str, Any]] = {
    "of no group": {"groups": []},
    "of another group": {"groups": ["others"]},
    "groups that are no list of names": {"groups": {"vision-team": True}},
    "no groups at all": {"groups": None},
    "no email": {"email": None},
    "an unverified email": {"email_verified": False},
    "an email that says it is verified": {"email_verified": "true"},
    "a name that owns nothing": {"email": "ann \n@example.org"},
}


@pytest.mark.parametrize(
    "claims",
    slow_but_for(NOT_ADMITTED.values(), NOT_ADMITTED["of another group"], NOT_ADMITTED["an unverified email"]),
    ids=NOT_ADMITTED,
)
def test_whoever_has_no_role_here_does_not_come_in(site: Site, claims: dict[str, Any]) -> None:
    refused(site, site.sign_in(**claims))


def refused(site: Site, answer: Answer) -> None:
    assert answer.status_code == 401, answer.text
    assert SESSION_COOKIE not in str(answer.headers.get_list("set-cookie"))
    assert site.store.keys.list() == []
    assert site.recorded()[-1]["action"] == "sign_in.refuse"
    assert site.store.client.call("KEYS", "trivet:session:*") == []


WRONG_CLAIMS: dict[str, dict[str, Any]] = {
    "another nonce": {"nonce": "another"},
    "no nonce": {"nonce": None},
    "another audience": {"aud": "other"},
    "another client": {"azp": "other"},
    "another issuer": {"iss": "https://other.example"},
    "expired": {"exp": int(time.time()) - 3600, "iat": int(time.time()) - 7200},
}


@pytest.mark.parametrize("claims", first_fast(1, WRONG_CLAIMS.values()), ids=WRONG_CLAIMS)
def test_a_wrong_token_is_refused(site: Site, claims: dict[str, Any]) -> None:
    refused(site, site.sign_in(**claims))


FORGERIES: dict[str, Callable[[dict[str, Any]], str]] = {
    "alg none": lambda claims: jwt.encode(claims, "", algorithm="none", headers={"kid": "first"}),
    "our own secret": lambda claims: jwt.encode(claims, CLIENT_SECRET * 2, algorithm="HS256", headers={"kid": "first"}),
    "another key of the same id": SigningKey("first").sign,
    "a key that is not published": SigningKey("second").sign,
    "no token": lambda _: "",
}


@pytest.mark.parametrize("token", first_fast(2, FORGERIES.values()), ids=FORGERIES)
def test_a_forged_token_is_refused(site: Site, token: Callable[[dict[str, Any]], str]) -> None:
    site.provider.token = token
    refused(site, site.sign_in())


def test_a_state_is_good_once(site: Site) -> None:
    site.provider.claims = ANN
    came_back = site.begin()
    kept = dict(site.browser.cookies)
    assert site.finish(came_back).status_code == 200
    site.browser.cookies.update(kept)
    again = site.finish(came_back)
    assert (again.status_code, "has already ended" in again.json()["detail"]) == (401, True)


def test_a_sign_in_of_another_browser_is_refused(site: Site) -> None:
    """Else somebody could be made to work, unknowingly, in an attacker's session."""
    site.provider.claims = ANN
    came_back = site.begin()
    site.browser.cookies.clear()
    refused(site, site.finish(came_back))
    site.begin()
    refused(site, site.finish(came_back))


def test_a_code_of_another_sign_in_is_refused(site: Site) -> None:
    """The provider compares the verifier of this one with the challenge of that one (PKCE)."""
    site.provider.claims = ANN
    stolen = site.begin()["code"]
    refused(site, site.finish({**site.begin(), "code": stolen}))


def test_an_answer_of_another_issuer_is_refused(site: Site) -> None:
    site.provider.claims = ANN
    refused(site, site.finish({**site.begin(), "iss": "https://other.example"}))
    assert site.finish({**site.begin(), "iss": site.provider.issuer}).status_code == 200


@pytest.mark.parametrize(
    "came_back", [{"state": "x", "code": "y"}, {"state": "x"}, {"state": "x", "error": "access_denied"}]
)
def test_what_was_never_begun_is_refused(site: Site, came_back: dict[str, str]) -> None:
    refused(site, site.finish(came_back))


def test_the_word_of_a_provider_that_refuses_is_passed_on(site: Site) -> None:
    came_back = site.begin()
    answer = site.finish({"state": came_back["state"], "error": "access_denied"})
    refused(site, answer)
    assert "access_denied" in answer.json()["detail"]


def test_whoever_comes_right_after_the_provider_changed_its_keys_is_let_in(site: Site) -> None:
    assert site.sign_in().status_code == 200
    fresh = SigningKey("fresh")
    site.provider.token, site.provider.published = fresh.sign, [fresh]
    answer = site.sign_in()
    assert answer.status_code == 200, answer.text


def test_a_provider_may_change_its_keys(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.sign_in.provider._REFRESH_S", 0.0)
    assert site.sign_in().status_code == 200
    fresh = SigningKey("fresh")
    site.provider.token, site.provider.published = fresh.sign, [site.provider.key, fresh]
    assert site.sign_in().status_code == 200
    site.provider.token, site.provider.published = site.provider.key.sign, [fresh]
    monkeypatch.setattr("api.sign_in.provider._METADATA_S", 0.0)
    assert site.sign_in().status_code == 401


def test_unknown_keys_do_not_make_the_service_ask_again_and_again(site: Site) -> None:
    site.provider.token = SigningKey("unknown").sign
    site.sign_in()
    before = site.provider.asked_for_keys
    for _ in range(5):
        assert site.sign_in().status_code == 401
    assert site.provider.asked_for_keys <= before + 1


def test_a_provider_that_is_away_is_not_asked_by_every_sign_in_and_its_last_keys_are_used(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert site.sign_in().status_code == 200
    provider, asked = context_of(site.app).provider, list[str]()
    assert provider is not None

    def silent(request: httpx2.Request) -> Answer:
        asked.append(str(request.url))
        raise httpx2.ConnectTimeout("timed out")

    provider._http = httpx2.Client(transport=httpx2.MockTransport(silent))
    monkeypatch.setattr("api.sign_in.provider._METADATA_S", 0.0)
    monkeypatch.setattr("api.sign_in.provider._AWAY_S", 3600.0)
    monkeypatch.setattr("api.sign_in.provider._WAIT_S", 0.0)
    begun = [site.browser.post("/login/oidc", headers=PAGES).status_code for _ in range(2)]
    with provider._lock:  # another thread waits for the provider
        begun.append(site.browser.post("/login/oidc", headers=PAGES).status_code)
        monkeypatch.setattr("api.sign_in.provider._STALE_S", 0.0)
        waited = site.browser.post("/login/oidc", headers=PAGES)
    refused = site.browser.post("/login/oidc", headers=PAGES)
    assert begun == [200, 200, 200]
    assert (waited.status_code, refused.status_code, len(asked)) == (502, 502, 1)
    assert "is being fetched" in waited.json()["detail"]
    assert "timed out" in refused.json()["detail"]


ODD_METADATA: dict[str, dict[str, Any]] = {
    "another issuer": {"issuer": "https://other.example"},
    "no keys": {"jwks_uri": None},
    "a file": {"token_endpoint": "file:///etc/passwd"},
    "no host": {"jwks_uri": "https://a..b/keys"},
    "no URL": {"jwks_uri": "https://localhost/\u0001"},
}


@pytest.mark.parametrize("metadata", ODD_METADATA.values(), ids=ODD_METADATA)
def test_a_provider_that_is_not_what_it_should_be_is_not_used(
    site: Site, metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.sign_in.provider._METADATA_S", 0.0)
    site.provider.metadata = metadata
    answer = site.browser.post("/login/oidc", headers=PAGES)
    assert (answer.status_code, "provider" in answer.json()["detail"]) == (502, True)


def test_other_sites_begin_and_finish_nothing(site: Site) -> None:
    came_back = site.begin()
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}, {}):
        assert site.browser.post("/login/oidc", headers=headers).status_code == 403
        assert site.browser.post("/login/oidc/callback", data=came_back, headers=headers).status_code == 403


def test_many_refusals_have_to_wait(site: Site) -> None:
    answers = [site.finish({"state": "x", "code": "y"}).status_code for _ in range(12)]
    assert answers[0] == 401
    assert answers[-1] == 429
    assert site.sign_in().status_code == 200, "another person at the same address"


def test_pages_offer_the_provider_where_there_is_one(site: Site, tmp_path: Any) -> None:
    assert 'id="provider"' in site.browser.get("/login").text
    assert site.browser.get("/login/callback?code=x&state=y").status_code == 200
    without = TestClient(create_app(Settings(data=tmp_path, allowed_hosts="testserver")))
    assert 'id="provider"' not in without.get("/login").text
    assert without.post("/login/oidc", headers=PAGES).status_code in (404, 503)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"oidc_issuer": "http://issuer.example"}, "https"),
        ({"oidc_issuer": "issuer.example"}, "https"),
        ({"oidc_issuer": "https://issuer.example", "oidc_roles": ""}, "oidc_roles"),
        ({"oidc_issuer": "https://issuer.example", "oidc_client_id": None}, "oidc_client_id"),
        ({"oidc_roles": "vision-team"}, "is not a rule"),
        ({"oidc_roles": "vision-team=vision:owner"}, "is not a role"),
        ({"oidc_roles": "vision-team=Vision:viewer"}, "not the name of a project"),
        ({"oidc_scopes": "email profile"}, "openid"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], told: str) -> None:
    whole = {"oidc_client_id": "trivet", "oidc_roles": "*=default:viewer"}
    with pytest.raises(ValidationError, match=told):
        Settings(**whole | changes)
