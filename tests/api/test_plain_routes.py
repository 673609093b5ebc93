"""Plain requests for jobs are answered ahead of the framework, and by nothing can be told from its own answers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import orjson
import pytest
import redis as redis_py
from api_world import TRAIN, Keys, bearer
from fastapi.testclient import TestClient

from api.callers import EXPIRY_HEADER
from api.front import plain_routes
from service.jobs.store import AuditFilter, Store, StoreUnavailable
from service.jobs.store.keyspace import API_KEYS

OF_A_REQUEST = {"x-request-id", "date"}
"""Headers that differ between any two answers."""
OF_A_JOB = ("id", "created_at")
OF_AN_ANSWER = OF_A_REQUEST | {"location", "content-length"}
"""What differs between any two submissions."""
FRAMEWORK = {"params": {"project": "default"}}
"""Makes a submission of the default project one that the framework answers."""


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each request that was looked at ahead of the framework: whether it was answered there, not left to it."""
    answers: list[bool] = []

    def noting(look: Callable[..., object]) -> Callable[..., object]:
        def noted(*arguments: object) -> object:
            found = look(*arguments)
            answers.append(found is not None)
            return found

        return noted

    for name in ("_read", "_submission"):
        monkeypatch.setattr(plain_routes, name, noting(getattr(plain_routes, name)))
    return answers


def told(answer: httpx2.Response) -> tuple[int, bytes, dict[str, str]]:
    body = answer.content.replace(answer.headers["x-request-id"].encode(), b"")
    headers = {name: value for name, value in answer.headers.items() if name not in OF_A_REQUEST}
    return answer.status_code, body, headers


def test_both_say_the_same_of_a_job(running: TestClient, keys: Keys, ahead: list[bool]) -> None:
    submitter = bearer(keys["submit"])
    job = running.post("/v1/jobs", json={**TRAIN, "labels": {"a": "ö"}}, headers=submitter).json()
    ahead.clear()
    plain = running.get(f"/v1/jobs/{job['id']}", headers=submitter)
    assert plain.json()["spec"] == job["spec"]
    assert told(plain) == told(running.get(f"/v1/jobs/{job['id']}?wait_s=0", headers=submitter))
    assert ahead == [True]


@pytest.mark.parametrize("query", ["", "limit=2"])
def test_both_say_the_same_of_a_list(
    running: TestClient, keys: Keys, store: Store, ahead: list[bool], query: str
) -> None:
    """Of a project's own jobs, of those that are shared with it, and of no others; to an operator of all."""
    others = [running.post("/v1/jobs", json=TRAIN, headers=bearer(keys["submit"])).json()["id"] for _ in range(3)]
    own = keys.of("north", "submit")
    running.post("/v1/jobs", json=TRAIN, headers=bearer(own))
    for name in ("north", "south"):
        keys.of(name, "read")
        store.jobs.share(others[0], name)
    for secret in (own, keys.of("south", "read"), keys["submit"], keys["admin"]):
        ahead.clear()
        plain = running.get(f"/v1/jobs?{query}", headers=bearer(secret))
        assert told(plain) == told(running.get(f"/v1/jobs?{query}&order=newest", headers=bearer(secret)))
        assert ahead == [True]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=01", "limit=5&limit=6", "limit=a", "q=x", "limit=%35"]
)
def test_other_lists_are_the_frameworks(client: TestClient, ahead: list[bool], query: str) -> None:
    assert client.get(f"/v1/jobs?{query}").status_code in (200, 422)
    assert ahead == []


def test_what_is_refused_is_refused_by_the_framework(
    running: TestClient, keys: Keys, store: Store, ahead: list[bool]
) -> None:
    job = running.post("/v1/jobs", json=TRAIN, headers=bearer(keys["submit"])).json()
    gone = keys.named("gone", "read")
    store.keys.revoke(gone.split("_")[1])
    stranger = keys.of("elsewhere", "admin")
    nobody = f"tvt_{'0' * 16}_none"
    ahead.clear()
    for secret, job_id, status in (
        (keys["read"], "job_" + "0" * 20, 404),
        (stranger, job["id"], 404),
        (gone, job["id"], 401),
        (nobody, job["id"], 401),
    ):
        refused = running.get(f"/v1/jobs/{job_id}", headers=bearer(secret))
        assert refused.status_code == status
        assert told(refused) == told(running.get(f"/v1/jobs/{job_id}?wait_s=0", headers=bearer(secret)))
    assert ahead == [False] * 4
    assert len(store.audit.page(AuditFilter(action="key.refuse"), limit=50).items) == 4, "one of each request"


def test_a_job_that_is_shared_names_only_the_readers_project(running: TestClient, keys: Keys, store: Store) -> None:
    job = running.post("/v1/jobs", json=TRAIN, headers=bearer(keys["submit"])).json()
    secrets = {name: keys.of(name, "read") for name in ("north", "south")}
    for name in secrets:
        store.jobs.share(job["id"], name)
    for name, secret in secrets.items():
        assert running.get(f"/v1/jobs/{job['id']}", headers=bearer(secret)).json()["shared_with"] == [name]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Basic YTpi"}, {"Authorization": "Bearer"}])
def test_what_is_no_key_is_not_looked_up(anonymous: TestClient, headers: dict[str, str], ahead: list[bool]) -> None:
    assert anonymous.get("/v1/jobs/job_" + "0" * 20, headers=headers).status_code == 401
    assert ahead == []


def test_a_key_near_its_end_is_told_so(
    running: TestClient, keys: Keys, store: Store, redis: redis_py.Redis, ahead: list[bool]
) -> None:
    job = running.post("/v1/jobs", json=TRAIN, headers=bearer(keys["submit"])).json()
    key, secret = store.keys.create("ann", ["read"], expires_at=datetime.now(UTC) + timedelta(days=1))
    entry = orjson.loads(redis.hget(API_KEYS(), key.id))
    made_long_ago = entry["created_at"] - 9 * 86_400_000
    redis.hset(API_KEYS(), key.id, orjson.dumps({**entry, "created_at": made_long_ago}))
    ahead.clear()
    plain = running.get(f"/v1/jobs/{job['id']}", headers=bearer(secret))
    assert ahead == [True]
    assert EXPIRY_HEADER in plain.headers
    assert told(plain) == told(running.get(f"/v1/jobs/{job['id']}?wait_s=0", headers=bearer(secret)))


def test_such_reads_are_counted_under_their_route(running: TestClient, keys: Keys) -> None:
    submitter = bearer(keys["submit"])
    job = running.post("/v1/jobs", json=TRAIN, headers=submitter).json()
    running.get(f"/v1/jobs/{job['id']}", headers=submitter)
    running.get("/v1/jobs", headers=submitter)
    counted = running.get("/metrics", headers=bearer(keys["admin"])).text
    for route in ("/v1/jobs/{job_id}", "/v1/jobs"):
        assert f'trivet_request_seconds_count{{method="GET",route="{route}",status="200"}}' in counted


def told_of_a_job(answer: httpx2.Response) -> tuple[int, Any, dict[str, str]]:
    body = answer.json()
    if answer.status_code == 201:
        assert answer.headers["location"] == f"/v1/jobs/{body['id']}"
    else:
        assert body.pop("request_id", None) in (None, answer.headers["x-request-id"])
    headers = {name: value for name, value in answer.headers.items() if name not in OF_AN_ANSWER}
    return answer.status_code, {name: value for name, value in body.items() if name not in OF_A_JOB}, headers


@pytest.mark.parametrize("scope", ["submit", "admin"])
def test_both_accept_the_same_job(running: TestClient, keys: Keys, store: Store, ahead: list[bool], scope: str) -> None:
    spec, headers = {**TRAIN, "name": "ö", "labels": {"a": "b"}}, bearer(keys[scope])
    plain = running.post("/v1/jobs", json=spec, headers=headers)
    assert told_of_a_job(plain) == told_of_a_job(running.post("/v1/jobs", json=spec, headers=headers, **FRAMEWORK))
    assert ahead == [True]
    assert running.get(plain.headers["location"], headers=headers).json() == plain.json()
    first, second = store.audit.page(AuditFilter(action="job.submit"), limit=2).items
    varying = {"number", "time", "hash", "previous", "job"}
    assert first.model_dump(exclude=varying) == second.model_dump(exclude=varying)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"kind": "train", "kind": "train"}',
        b'{"kind": "nothing"}',
        b'{"kind": "train", "steps": -1}',
        b"\xff",
        b"[" * 5000,
    ],
)
def test_what_is_no_spec_is_refused_by_the_framework(
    running: TestClient, keys: Keys, ahead: list[bool], content: bytes
) -> None:
    headers = {**bearer(keys["submit"]), "Content-Type": "application/json"}
    refused = running.post("/v1/jobs", content=content, headers=headers)
    assert ahead == [False]
    assert told_of_a_job(refused) == told_of_a_job(
        running.post("/v1/jobs", content=content, headers=headers, **FRAMEWORK)
    )


@pytest.mark.parametrize("named", ["read", "nobody"])
def test_a_key_that_may_not_is_refused_by_the_framework(
    running: TestClient, keys: Keys, ahead: list[bool], named: str
) -> None:
    headers = bearer(keys["read"] if named == "read" else f"tvt_{'0' * 16}_none")
    refused = running.post("/v1/jobs", json=TRAIN, headers=headers)
    assert ahead == [False]
    assert told_of_a_job(refused) == told_of_a_job(running.post("/v1/jobs", json=TRAIN, headers=headers, **FRAMEWORK))


def test_a_job_that_could_not_run_is_refused_alike(running: TestClient, keys: Keys, ahead: list[bool]) -> None:
    spec, headers = {**TRAIN, "model": {**TRAIN["model"], "in_features": 63}}, bearer(keys["submit"])
    refused = running.post("/v1/jobs", json=spec, headers=headers)
    assert refused.status_code == 422
    assert ahead == [True]
    assert told_of_a_job(refused) == told_of_a_job(running.post("/v1/jobs", json=spec, headers=headers, **FRAMEWORK))


@pytest.mark.parametrize(
    "fields",
    [
        {"after": ["job_" + "0" * 20]},
        {"sweep": {"seed": [0, 1]}},
        {"data": {"source": "file", "file": "file_" + "0" * 64}},
    ],
)
def test_specs_that_name_others_are_the_frameworks(
    running: TestClient, keys: Keys, ahead: list[bool], fields: dict[str, Any]
) -> None:
    headers, spec = bearer(keys["submit"]), {**TRAIN, **fields}
    assert told_of_a_job(running.post("/v1/jobs", json=spec, headers=headers))[0] in (201, 422)
    assert ahead == [False]


def test_a_key_for_idempotency_and_other_bodies_are_the_frameworks(
    running: TestClient, keys: Keys, ahead: list[bool]
) -> None:
    headers = bearer(keys["submit"])
    twice = [
        running.post("/v1/jobs", json=TRAIN, headers={**headers, "Idempotency-Key": "one"}).status_code for _ in "ab"
    ]
    assert twice == [201, 200]
    assert running.post("/v1/jobs", content=b"kind: train", headers=headers).status_code in (415, 422)
    assert ahead == []


def test_a_broker_that_goes_away_is_told_of_alike(
    running: TestClient, keys: Keys, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*arguments: Any) -> None:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(type(store.jobs), "accept", away)
    headers = bearer(keys["submit"])
    refused = running.post("/v1/jobs", json=TRAIN, headers=headers)
    assert refused.status_code == 503
    assert told_of_a_job(refused) == told_of_a_job(running.post("/v1/jobs", json=TRAIN, headers=headers, **FRAMEWORK))
