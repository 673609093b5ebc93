"""Plain reads of jobs are answered ahead of the framework, and by nothing can be told from its own answers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import orjson
import pytest
import redis as redis_py
from api_world import TRAIN, Keys, bearer
from fastapi.testclient import TestClient

from api.callers import EXPIRY_HEADER
from api.front import PlainReads
from service.jobs.store import AuditFilter, Store
from service.jobs.store.keyspace import API_KEYS

OF_A_REQUEST = {"x-request-id", "date"}
"""Headers that differ between any two answers."""


@pytest.fixture
def read_ahead(monkeypatch: pytest.MonkeyPatch) -> list[bytes | None]:
    """What is answered ahead, and ``None`` for each that was left to the framework."""
    answers: list[bytes | None] = []
    read = PlainReads._read

    def noted(self: PlainReads, *arguments: Any) -> bytes | None:
        answers.append(read(self, *arguments))
        return answers[-1]

    monkeypatch.setattr(PlainReads, "_read", noted)
    return answers


def told(answer: httpx2.Response) -> tuple[int, bytes, dict[str, str]]:
    body = answer.content.replace(answer.headers["x-request-id"].encode(), b"")
    headers = {name: value for name, value in answer.headers.items() if name not in OF_A_REQUEST}
    return answer.status_code, body, headers


def test_both_say_the_same_of_a_job(running: TestClient, keys: Keys, read_ahead: list[bytes | None]) -> None:
    submitter = bearer(keys["submit"])
    job = running.post("/v1/jobs", json={**TRAIN, "labels": {"a": "ö"}}, headers=submitter).json()
    ahead = running.get(f"/v1/jobs/{job['id']}", headers=submitter)
    assert read_ahead == [ahead.content]
    assert ahead.json()["spec"] == job["spec"]
    assert told(ahead) == told(running.get(f"/v1/jobs/{job['id']}?wait_s=0", headers=submitter))
    assert len(read_ahead) == 1


@pytest.mark.parametrize("query", ["", "limit=2"])
def test_both_say_the_same_of_a_list(
    running: TestClient, keys: Keys, store: Store, read_ahead: list[bytes | None], query: str
) -> None:
    """Of a project's own jobs, of those that are shared with it, and of no others; to an operator of all."""
    others = [running.post("/v1/jobs", json=TRAIN, headers=bearer(keys["submit"])).json()["id"] for _ in range(3)]
    own = keys.of("north", "submit")
    running.post("/v1/jobs", json=TRAIN, headers=bearer(own))
    for name in ("north", "south"):
        keys.of(name, "read")
        store.jobs.share(others[0], name)
    for secret in (own, keys.of("south", "read"), keys["submit"], keys["admin"]):
        ahead = running.get(f"/v1/jobs?{query}", headers=bearer(secret))
        assert ahead.status_code == 200
        assert told(ahead) == told(running.get(f"/v1/jobs?{query}&order=newest", headers=bearer(secret)))
        assert read_ahead.pop() == ahead.content
    assert read_ahead == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=01", "limit=5&limit=6", "limit=a", "q=x", "limit=%35"]
)
def test_other_lists_are_the_frameworks(client: TestClient, read_ahead: list[bytes | None], query: str) -> None:
    assert client.get(f"/v1/jobs?{query}").status_code in (200, 422)
    assert read_ahead == []


def test_what_is_refused_is_refused_by_the_framework(
    running: TestClient, keys: Keys, store: Store, read_ahead: list[bytes | None]
) -> None:
    job = running.post("/v1/jobs", json=TRAIN, headers=bearer(keys["submit"])).json()
    gone = keys.named("gone", "read")
    store.keys.revoke(gone.split("_")[1])
    stranger = keys.of("elsewhere", "admin")
    nobody = f"tvt_{'0' * 16}_none"
    for secret, job_id, status in (
        (keys["read"], "job_" + "0" * 20, 404),
        (stranger, job["id"], 404),
        (gone, job["id"], 401),
        (nobody, job["id"], 401),
    ):
        refused = running.get(f"/v1/jobs/{job_id}", headers=bearer(secret))
        assert refused.status_code == status
        assert told(refused) == told(running.get(f"/v1/jobs/{job_id}?wait_s=0", headers=bearer(secret)))
    assert read_ahead == [None] * 4
    assert len(store.audit.page(AuditFilter(action="key.refuse"), limit=50).items) == 4, "one of each request"


def test_a_job_that_is_shared_names_only_the_readers_project(running: TestClient, keys: Keys, store: Store) -> None:
    job = running.post("/v1/jobs", json=TRAIN, headers=bearer(keys["submit"])).json()
    secrets = {name: keys.of(name, "read") for name in ("north", "south")}
    for name in secrets:
        store.jobs.share(job["id"], name)
    for name, secret in secrets.items():
        assert running.get(f"/v1/jobs/{job['id']}", headers=bearer(secret)).json()["shared_with"] == [name]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Basic YTpi"}, {"Authorization": "Bearer"}])
def test_what_is_no_key_is_not_looked_up(
    anonymous: TestClient, headers: dict[str, str], read_ahead: list[bytes | None]
) -> None:
    assert anonymous.get("/v1/jobs/job_" + "0" * 20, headers=headers).status_code == 401
    assert read_ahead == []


def test_a_key_near_its_end_is_told_so(
    running: TestClient, keys: Keys, store: Store, redis: redis_py.Redis, read_ahead: list[bytes | None]
) -> None:
    job = running.post("/v1/jobs", json=TRAIN, headers=bearer(keys["submit"])).json()
    key, secret = store.keys.create("ann", ["read"], expires_at=datetime.now(UTC) + timedelta(days=1))
    entry = orjson.loads(redis.hget(API_KEYS(), key.id))
    made_long_ago = entry["created_at"] - 9 * 86_400_000
    redis.hset(API_KEYS(), key.id, orjson.dumps({**entry, "created_at": made_long_ago}))
    ahead = running.get(f"/v1/jobs/{job['id']}", headers=bearer(secret))
    assert read_ahead == [ahead.content]
    assert EXPIRY_HEADER in ahead.headers
    assert told(ahead) == told(running.get(f"/v1/jobs/{job['id']}?wait_s=0", headers=bearer(secret)))


def test_such_reads_are_counted_under_their_route(running: TestClient, keys: Keys) -> None:
    submitter = bearer(keys["submit"])
    job = running.post("/v1/jobs", json=TRAIN, headers=submitter).json()
    running.get(f"/v1/jobs/{job['id']}", headers=submitter)
    running.get("/v1/jobs", headers=submitter)
    counted = running.get("/metrics", headers=bearer(keys["admin"])).text
    for route in ("/v1/jobs/{job_id}", "/v1/jobs"):
        assert f'trivet_request_seconds_count{{method="GET",route="{route}",status="200"}}' in counted
