"""Sessions of the dashboard: the cookie is no key and admits nobody alone; what ends, ends at once, streams with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis as redis_py
from digits import digits_job
from lanes import first_fast
from pydantic import SecretStr
from serving import Service, serving
from waiting import eventually

from service.jobs.records import ApiKey
from service.jobs.settings import Settings
from service.jobs.store.keyspace import SESSION, SESSION_TICKET
from service.jobs.store.sessions import SessionSecrets

SPEC = digits_job()
ENDS_WITHIN_S = 50.0
"""The service looks twice a second; a busy machine gets more time before a test calls a stream endless."""


@pytest.fixture(scope="module")
def running(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    settings = Settings(data=tmp_path_factory.mktemp("sessions"), redis_url=SecretStr(broker))
    with serving(settings) as service:
        yield service


@pytest.fixture
def service(running: Service, redis: redis_py.Redis) -> Service:
    """A service whose database is empty."""
    return running


@pytest.fixture
def signed(service: Service) -> tuple[ApiKey, str, SessionSecrets]:
    """A key, its secret, and a session of it that was begun through the API."""
    key, secret = service.store.keys.create("ann", ["admin"])
    answer = httpx2.post(f"{service.url}/login", data={"key": secret}, headers={"X-Trivet": "1"}, timeout=300)
    assert answer.status_code == 200
    return key, secret, SessionSecrets(answer.cookies["trivet_session"], answer.json()["session"])


def by_cookie(session: SessionSecrets, *, page: bool = True) -> dict[str, str]:
    headers = {"Cookie": f"trivet_session={session.cookie}"}
    return {**headers, "X-Trivet-Session": session.page} if page else headers


def jobs(service: Service, headers: dict[str, str], **params: str) -> int:
    return httpx2.get(f"{service.url}/v1/jobs", headers=headers, params=params, timeout=300).status_code


def test_neither_the_key_nor_a_secret_is_in_the_cookie_or_the_store(
    service: Service, signed: tuple[ApiKey, str, SessionSecrets], redis: redis_py.Redis
) -> None:
    _, secret, session = signed
    random = secret.split("_", 2)[2]  # which may have underscores of its own
    assert random not in session.cookie
    stored = b"".join(redis.dump(name) + name for name in redis.keys("*"))
    for each in (random, session.cookie, session.page):
        assert each.encode() not in stored


def test_the_cookie_alone_which_other_ports_of_the_host_see_admits_nobody(
    service: Service, signed: tuple[ApiKey, str, SessionSecrets]
) -> None:
    _, _, session = signed
    assert jobs(service, by_cookie(session)) == 200
    assert jobs(service, by_cookie(session, page=False)) == 401
    assert jobs(service, {"X-Trivet-Session": session.page}) == 401
    assert jobs(service, {**by_cookie(session, page=False), "X-Trivet-Session": session.cookie}) == 401
    stolen = httpx2.post(
        f"{service.url}/tickets",
        data={"path": "/v1/jobs"},
        headers={**by_cookie(session, page=False), "Sec-Fetch-Site": "same-origin"},
        timeout=300,
    )
    assert stolen.status_code == 401
    assert jobs(service, {**by_cookie(session), "Sec-Fetch-Site": "same-site"}) == 403


def test_a_ticket_admits_to_its_path_for_reading_and_with_the_cookie_only(
    service: Service, signed: tuple[ApiKey, str, SessionSecrets], redis: redis_py.Redis
) -> None:
    _, secret, session = signed
    cookie = by_cookie(session, page=False)
    ticket = service.store.sessions.ticket(session.cookie, "/v1/jobs")
    assert jobs(service, cookie, ticket=ticket) == 200
    assert jobs(service, {}, ticket=ticket) == 401
    assert jobs(service, cookie, ticket=f"{ticket}x") == 401
    assert (
        httpx2.get(f"{service.url}/v1/hosts", headers=cookie, params={"ticket": ticket}, timeout=300).status_code == 401
    )
    changing = {**cookie, "Sec-Fetch-Site": "same-origin"}
    posted = httpx2.post(f"{service.url}/v1/jobs", headers=changing, params={"ticket": ticket}, json=SPEC, timeout=300)
    assert posted.status_code == 401
    for name in redis.keys(SESSION_TICKET("*", "*")):
        assert 0 < redis.ttl(name) <= 300
    by_key = httpx2.post(f"{service.url}/tickets", data={"path": "/v1/jobs"}, headers=bearer(secret), timeout=300)
    assert by_key.status_code == 403


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_a_ticket_is_for_the_path_as_it_is_sent(service: Service, signed: tuple[ApiKey, str, SessionSecrets]) -> None:
    """Escapes in names of artifacts stay as they are: the path of the ticket and of the request are the same text."""
    _, _, session = signed
    path = "/v1/jobs/job_x/artifacts/a%20b/%C3%A9.txt"
    headers = {**by_cookie(session), "Sec-Fetch-Site": "same-origin"}
    answer = httpx2.post(f"{service.url}/tickets", data={"path": path}, headers=headers, timeout=300)
    found = httpx2.get(
        f"{service.url}{path}?ticket={answer.json()['ticket']}", headers=by_cookie(session, page=False), timeout=300
    )
    assert found.status_code == 404


def test_signing_out_ends_the_session_on_the_server(
    service: Service, signed: tuple[ApiKey, str, SessionSecrets]
) -> None:
    _, secret, session = signed
    headers = {**by_cookie(session, page=False), "Sec-Fetch-Site": "same-origin"}
    assert httpx2.post(f"{service.url}/logout", headers=headers, timeout=300).status_code == 204
    assert jobs(service, by_cookie(session)) == 401
    assert jobs(service, bearer(secret)) == 200


def test_revoking_the_key_ends_its_sessions(
    service: Service, signed: tuple[ApiKey, str, SessionSecrets], redis: redis_py.Redis
) -> None:
    key, _, session = signed
    service.store.keys.revoke(key.id)
    assert jobs(service, by_cookie(session)) == 401
    assert redis.keys(SESSION("*")) == []


def test_signing_in_again_ends_the_session_before(service: Service, signed: tuple[ApiKey, str, SessionSecrets]) -> None:
    _, secret, session = signed
    headers = {**by_cookie(session, page=False), "X-Trivet": "1"}
    assert httpx2.post(f"{service.url}/login", data={"key": secret}, headers=headers, timeout=300).status_code == 200
    assert jobs(service, by_cookie(session)) == 401


def test_a_session_lasts_from_use_to_use_but_not_beyond_its_end(
    service: Service, signed: tuple[ApiKey, str, SessionSecrets], redis: redis_py.Redis
) -> None:
    _, _, session = signed
    (name,) = redis.keys(SESSION("*"))
    idle_ms, longest_ms = 3_600_000, 43_200_000
    assert idle_ms - 600_000 < redis.pttl(name) <= idle_ms
    redis.pexpire(name, 1_000_000)
    assert jobs(service, by_cookie(session, page=False)) == 401
    assert redis.pttl(name) <= 1_000_000, "a request that was refused is no use"
    assert jobs(service, by_cookie(session)) == 200
    assert redis.pttl(name) > 1_000_000
    ends = int(redis.hget(name, "ends"))
    assert 0 < ends - time.time() * 1000 <= longest_ms
    soon = round(time.time() * 1000) + 500_000
    redis.hset(name, "ends", soon)
    assert jobs(service, by_cookie(session)) == 200
    # The host's clock may be set back meanwhile.
    assert redis.pttl(name) <= 600_000, "use does not carry a session beyond its end"
    redis.hset(name, "ends", soon - 600_000)
    assert jobs(service, by_cookie(session)) == 401
    assert not redis.exists(name)


End = Callable[[Service, ApiKey, SessionSecrets], Any]
ENDS: dict[str, End] = {
    "revoked": lambda service, key, _: service.store.keys.revoke(key.id),
    "rotated without grace": lambda service, key, _: service.store.keys.rotate(key.id, grace_s=0),
    "signed out": lambda service, _, session: service.store.sessions.end(session.cookie),
    "expired": lambda service, key, session: service.store.client.call(
        "PEXPIRE", SESSION(service.store.sessions.credential(key, session.cookie).session), 1
    ),
}


@pytest.mark.parametrize(
    "path", first_fast(1, ["/v1/jobs/{}/events", "/v1/events", "/v1/events?jobs={}", "/v1/jobs/{}/logs"])
)
@pytest.mark.parametrize("end", first_fast(2, ENDS.values()), ids=ENDS)
def test_an_open_stream_ends_with_its_session(
    service: Service, signed: tuple[ApiKey, str, SessionSecrets], path: str, end: End
) -> None:
    key, secret, session = signed
    job_id = httpx2.post(f"{service.url}/v1/jobs", json=SPEC, headers=bearer(secret), timeout=300).json()["id"]
    headers = {**by_cookie(session), "Accept": "text/event-stream"}
    with httpx2.stream("GET", service.url + path.format(job_id), headers=headers, timeout=ENDS_WITHIN_S) as response:
        assert response.status_code == 200
        events = iter(httpx2.EventSource(response))
        eventually(lambda: httpx2.get(f"{service.url}/metrics", timeout=300).text.find("event_streams 1.0") > 0)
        end(service, key, session)
        told = [event.event for event in events]
    assert told[-1] == "bye"
    assert "end" not in told
    refused = httpx2.get(service.url + path.format(job_id), headers=headers, timeout=300)
    assert refused.status_code == 401


def test_an_open_stream_of_a_revoked_key_ends_and_those_of_others_go_on(service: Service) -> None:
    key, secret = service.store.keys.create("ann", ["read"])
    _, other = service.store.keys.create("bob", ["read"])
    url, stream = f"{service.url}/v1/events", {"Accept": "text/event-stream"}
    with (
        httpx2.stream("GET", url, headers={**bearer(secret), **stream}, timeout=ENDS_WITHIN_S) as ending,
        httpx2.stream("GET", url, headers={**bearer(other), **stream}, timeout=ENDS_WITHIN_S) as going_on,
    ):
        lines = going_on.iter_lines()
        assert next(lines).startswith("retry")
        service.store.keys.revoke(key.id)
        assert [event.event for event in httpx2.EventSource(ending)][-1] == "bye"
        submitted = service.client("bob").post("/v1/jobs", json=SPEC)
        assert submitted.status_code == 201
        assert any(submitted.json()["id"] in line for line in lines)


def test_a_call_that_waits_for_a_job_is_refused_when_its_key_is_revoked(service: Service) -> None:
    key, secret = service.store.keys.create("ann", ["submit"])
    job_id = httpx2.post(f"{service.url}/v1/jobs", json=SPEC, headers=bearer(secret), timeout=300).json()["id"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            httpx2.get, f"{service.url}/v1/jobs/{job_id}?wait_s=60", headers=bearer(secret), timeout=ENDS_WITHIN_S
        )
        eventually(lambda: httpx2.get(f"{service.url}/metrics", timeout=300).text.find("event_streams 1.0") > 0)
        service.store.keys.revoke(key.id)
        assert asked.result().status_code == 401


@pytest.mark.slow
def test_how_long_sessions_last_is_a_setting(broker: str, tmp_path: Path, redis: redis_py.Redis) -> None:
    settings = Settings(data=tmp_path, redis_url=SecretStr(broker), session_idle_s=120, session_s=60)
    with serving(settings) as service:
        _, secret = service.store.keys.create("ann", ["read"])
        answer = httpx2.post(f"{service.url}/login", data={"key": secret}, headers={"X-Trivet": "1"}, timeout=300)
    assert "Max-Age=60" in answer.headers["set-cookie"]
    (name,) = redis.keys(SESSION("*"))
    assert 0 < redis.pttl(name) <= 60_000
