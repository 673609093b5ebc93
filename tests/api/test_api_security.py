"""Who may do what; nothing without a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py
from api_world import TRAIN, Keys, bearer, submit
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from starlette.routing import Mount

from api.callers import authenticated
from api.callers.security import PAGE_HEADER, SESSION_COOKIE
from api.front.middleware import SECURITY_HEADERS
from service.jobs.store import Store
from service.jobs.store.sessions import ALLOWED, WINDOW_S

OPEN = {
    "/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/login", "/logout", "/static", "/static/swagger",
    "/login/oidc", "/login/oidc/callback", "/login/callback",
    "/", "/jobs/{job_id}", "/hosts", "/compare", "/submit", "/specs", "/keys", "/files",
    "/alerts", "/audit", "/projects", "/queue",
}  # fmt: skip
"""Routes without a key: health, the contract, signing in, and the dashboard's shells, which hold no data."""
ADMIN_ONLY = [
    ("POST", "/v1/keys"), ("GET", "/v1/keys"), ("DELETE", "/v1/keys/x"),
    ("POST", "/v1/keys/x/rotate"), ("GET", "/v1/audit"),
    ("POST", "/v1/accounts"), ("GET", "/v1/accounts"), ("DELETE", "/v1/accounts/x"), ("POST", "/v1/accounts/x/keys"),
    ("POST", "/v1/accounts/x/disable"), ("POST", "/v1/accounts/x/enable"),
    ("POST", "/v1/hosts/x/drain"), ("POST", "/v1/hosts/x/resume"),
]  # fmt: skip
SUBMIT_ONLY = [
    ("POST", "/v1/jobs"), ("POST", "/v1/files"), ("POST", "/v1/jobs/x/cancel"), ("POST", "/v1/jobs/x/retry"),
    ("DELETE", "/v1/jobs/x"),
]  # fmt: skip


def routes(routed: Any, prefix: str = "", guards: tuple[Any, ...] = ()) -> Iterator[tuple[str, bool]]:
    """Every route below a router: its path, and whether it requires a key."""
    for route in routed.routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            context = route.include_context
            below = (*guards, *(dependency.dependency for dependency in inner.dependencies))
            yield from routes(inner, prefix + context.prefix, below)
        elif isinstance(route, APIRoute):
            yield prefix + route.path, authenticated in guards or requires_key(route.dependant)
        elif isinstance(route, Mount):
            yield prefix + route.path, False
        else:
            yield prefix + getattr(route, "path", repr(route)), False


def requires_key(dependant: Dependant) -> bool:
    return dependant.call is authenticated or any(requires_key(inner) for inner in dependant.dependencies)


def test_every_route_requires_a_key_or_is_open_on_purpose(app: FastAPI) -> None:
    found = dict(routes(app))
    assert len(found) > 20
    assert {path for path, guarded in found.items() if not guarded} <= OPEN
    assert all(guarded for path, guarded in found.items() if path.startswith("/v1"))


def test_every_documented_call_below_v1_is_refused_without_a_key(app: FastAPI, anonymous: TestClient) -> None:
    for path, operations in app.openapi()["paths"].items():
        for method in operations:
            if path.startswith("/v1"):
                answer = anonymous.request(method.upper(), path)
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("secret", ["", "x", "tvt_", "tvt__", "tvt_0000000000000000_x", "tvt_" + "é" * 10, "a" * 5000])
def test_a_wrong_key_is_refused(anonymous: TestClient, secret: str) -> None:
    answer = anonymous.get("/v1/jobs", headers={"Authorization": f"Bearer {secret}".encode()})
    assert answer.status_code == 401


def test_a_revoked_key_is_refused_at_once(client: TestClient, keys: Keys) -> None:
    secret = keys["read"]
    assert client.get("/v1/jobs", headers=bearer(secret)).status_code == 200
    key_id = next(key["id"] for key in client.get("/v1/keys").json()["items"] if key["name"] == "read")
    assert client.delete(f"/v1/keys/{key_id}").status_code == 204
    assert client.get("/v1/jobs", headers=bearer(secret)).status_code == 401


@pytest.mark.parametrize(("method", "path"), [*SUBMIT_ONLY, *ADMIN_ONLY])
def test_a_read_key_changes_nothing(anonymous: TestClient, keys: Keys, method: str, path: str) -> None:
    answer = anonymous.request(method, path, headers=bearer(keys["read"]), json=TRAIN)
    assert answer.status_code == 403
    assert "scope" in answer.json()["detail"]


@pytest.mark.parametrize(("method", "path"), ADMIN_ONLY)
def test_a_submit_key_administers_nothing(anonymous: TestClient, keys: Keys, method: str, path: str) -> None:
    answer = anonymous.request(method, path, headers=bearer(keys["submit"]), json={"name": "x"})
    assert answer.status_code == 403
    assert "'admin'" in answer.json()["detail"]


def test_scopes_contain_each_other(anonymous: TestClient, keys: Keys) -> None:
    assert anonymous.get("/v1/jobs", headers=bearer(keys["submit"])).status_code == 200
    assert anonymous.post("/v1/jobs", json=TRAIN, headers=bearer(keys["admin"])).status_code == 201


@pytest.fixture
def browser(anonymous: TestClient, keys: Keys) -> Iterator[TestClient]:
    """A client that signed in, and sends what our own pages send."""
    answer = anonymous.post("/login", data={"key": keys["admin"]}, headers={"Sec-Fetch-Site": "same-origin"})
    assert answer.status_code == 200
    anonymous.headers["X-Trivet-Session"] = answer.json()["session"]
    yield anonymous
    del anonymous.headers["X-Trivet-Session"]


def test_signing_in_sets_a_cookie_out_of_reach_of_scripts_and_other_sites(anonymous: TestClient, keys: Keys) -> None:
    answer = anonymous.post("/login", data={"key": keys["read"]}, headers={"X-Trivet": "1"})
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{SESSION_COOKIE}=")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert anonymous.get("/v1/jobs", headers={PAGE_HEADER: answer.json()["session"]}).status_code == 200


def test_a_secure_connection_gets_a_secure_cookie(app: FastAPI, keys: Keys) -> None:
    client = TestClient(app, base_url="https://testserver")
    answer = client.post("/login", data={"key": keys["read"]}, headers={"X-Trivet": "1"})
    assert "Secure" in answer.headers["set-cookie"].split("; ")
    assert answer.headers["set-cookie"].startswith(f"__Host-{SESSION_COOKIE}=")
    assert answer.headers["strict-transport-security"]
    assert client.get("/v1/jobs", headers={PAGE_HEADER: answer.json()["session"]}).status_code == 200


def test_a_wrong_key_does_not_sign_in(anonymous: TestClient) -> None:
    for headers in ({"X-Trivet": "1"}, {"Accept": "text/html", "Sec-Fetch-Site": "same-origin"}):
        answer = anonymous.post("/login", data={"key": "tvt_a_b"}, headers=headers)
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
    assert anonymous.post("/login", headers={"X-Trivet": "1"}).status_code == 422


def test_many_wrong_keys_from_one_address_have_to_wait_and_right_ones_do_not(
    anonymous: TestClient, keys: Keys, redis: redis_py.Redis
) -> None:
    headers = {"X-Trivet": "1"}
    for _ in range(ALLOWED):
        assert anonymous.post("/login", data={"key": "tvt_a_b"}, headers=headers).status_code == 401
    answer = anonymous.post("/login", data={"key": "tvt_a_b"}, headers=headers)
    assert answer.status_code == 429
    assert answer.headers["content-type"] == "application/problem+json"
    assert 0 < int(answer.headers["retry-after"]) <= WINDOW_S
    assert anonymous.post("/login", data={"key": keys["read"]}, headers=headers).status_code == 200
    (name,) = redis.keys("trivet:sign_ins:*")
    assert 0 < redis.pttl(name) <= WINDOW_S * 1000
    redis.delete(name)
    assert anonymous.post("/login", data={"key": "tvt_a_b"}, headers=headers).status_code == 401


def test_another_site_cannot_sign_a_browser_in(anonymous: TestClient, keys: Keys) -> None:
    answer = anonymous.post("/login", data={"key": keys["admin"]}, headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-site", "X-Trivet": "1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://testserver:8438"}, 403),
        ({"Origin": "http://evil.example", "X-Trivet": "1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 201),
        ({"Origin": "http://testserver"}, 201),
        ({"X-Trivet": "1"}, 201),
    ],
)
def test_a_session_changes_things_only_from_our_own_pages(
    browser: TestClient, headers: dict[str, str], status: int
) -> None:
    assert browser.get("/v1/jobs").status_code == 200
    assert browser.post("/v1/jobs", json=TRAIN, headers=headers).status_code == status


def test_signing_out_forgets_the_session(browser: TestClient) -> None:
    assert browser.post("/logout").status_code == 403
    assert browser.post("/logout", headers={"X-Trivet": "1"}).status_code == 204
    assert browser.get("/v1/jobs").status_code == 401


def test_a_key_in_the_header_goes_before_the_cookie(browser: TestClient, keys: Keys) -> None:
    assert browser.post("/v1/jobs", json=TRAIN, headers=bearer(keys["read"])).status_code == 403


@pytest.mark.parametrize("path", ["/v1/jobs", "/healthz", "/login", "/nothing", "/v1/keys", "/openapi.json"])
def test_every_answer_carries_security_headers(anonymous: TestClient, path: str) -> None:
    headers = anonymous.get(path).headers
    assert {name.lower() for name in SECURITY_HEADERS} <= set(headers)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_answers_with_data_are_not_cached(client: TestClient) -> None:
    assert client.get("/v1/jobs").headers["cache-control"] == "no-store"
    assert "server" not in client.get("/v1/jobs").headers


def test_no_other_origin_is_let_in(client: TestClient) -> None:
    answer = client.options(
        "/v1/jobs", headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert "access-control-allow-origin" not in answer.headers
    assert answer.status_code in (401, 405)


def test_a_secret_is_stored_nowhere_in_the_clear(client: TestClient, store: Store, redis: Any) -> None:
    secret = client.post("/v1/keys", json={"name": "ann", "scopes": ["read"]}).json()["secret"]
    submit(client)
    listing = client.get("/v1/keys").text
    assert secret not in listing
    assert "digest" not in listing
    for key in redis.keys("*"):
        dumped = redis.dump(key)
        assert secret.split("_", 2)[2].encode() not in dumped
