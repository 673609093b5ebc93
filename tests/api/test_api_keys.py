"""Keys that expire and are rotated, through the API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest
import redis as redis_py
from api_world import Keys, bearer
from fastapi.testclient import TestClient

from api.callers import EXPIRY_HEADER
from service.jobs.store import Store
from service.jobs.store.keyspace import API_KEYS


def in_days(days: float) -> str:
    return (datetime.now(UTC) + timedelta(days=days)).isoformat()


def test_a_key_is_made_with_an_end_and_rotated_with_a_grace(client: TestClient) -> None:
    made = client.post("/v1/keys", json={"name": "ann", "expires_at": in_days(90)}).json()
    rotated = client.post(f"/v1/keys/{made['id']}/rotate", json={"grace_s": 3600})
    assert rotated.status_code == 201
    for secret in (made["secret"], rotated.json()["secret"]):
        assert client.get("/v1/jobs", headers=bearer(secret)).status_code == 200
    listed = {key["id"]: key for key in client.get("/v1/keys").json()["items"]}
    assert listed[made["id"]]["successor"] == rotated.json()["id"]
    assert listed[made["id"]]["expires_at"] < listed[rotated.json()["id"]]["expires_at"]
    at_once = client.post(f"/v1/keys/{rotated.json()['id']}/rotate", json={"grace_s": 0}).json()
    assert client.get("/v1/jobs", headers=bearer(rotated.json()["secret"])).status_code == 401
    assert client.get("/v1/jobs", headers=bearer(at_once["secret"])).status_code == 200
    assert client.post(f"/v1/keys/{made['id']}/rotate").status_code == 409


def test_a_key_that_lasts_as_long_as_any_is_listed_and_rotated(client: TestClient, redis: redis_py.Redis) -> None:
    made = client.post("/v1/keys", json={"name": "ann", "expires_at": "9999-12-31T23:59:59Z"}).json()
    entry = orjson.loads(redis.hget(API_KEYS(), made["id"]))
    redis.hset(API_KEYS(), made["id"], orjson.dumps(entry | {"expires_at": 253402343999000}))  # as earlier versions did
    assert client.post(f"/v1/keys/{made['id']}/rotate").json()["expires_at"] == made["expires_at"]
    assert client.get("/v1/keys").status_code == client.get("/metrics").status_code == 200


def test_a_caller_is_told_what_its_key_may_do(anonymous: TestClient, keys: Keys) -> None:
    def me(secret: str) -> dict[str, Any]:
        return dict(anonymous.get("/v1/me", headers=bearer(secret)).json())

    assert me(keys["admin"]) == {
        "name": "admin", "project": None, "scopes": ["admin", "read", "submit"], "operator": True,
    }  # fmt: skip
    assert me(keys.of("vision", "submit")) == {
        "name": "ann", "project": "vision", "scopes": ["read", "submit"], "operator": False,
    }  # fmt: skip
    assert me(keys.of("vision", "admin", "bea"))["operator"] is False
    assert anonymous.get("/v1/me").status_code == 401


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"name": "ann", "expires_at": "2001-01-01T00:00:00Z"}, "expires_at"),
        ({"name": "ann", "expires_at": "2999-01-01T00:00:00"}, "expires_at"),
        ({"name": "ann", "expires_at": "soon"}, "expires_at"),
        ({"name": "ann", "expires_at": "9999-12-31T23:59:59.999999Z"}, "expires_at"),
        ({"name": "ann", "expires_at": "9999-12-31T23:59:59-12:00"}, "expires_at"),
    ],
)
def test_odd_ends_are_refused(client: TestClient, body: dict[str, Any], path: str) -> None:
    answer = client.post("/v1/keys", json=body)
    assert answer.status_code == 422
    assert [error["path"] for error in answer.json()["errors"]] == [path]


def test_odd_rotations_are_refused(client: TestClient, store: Store) -> None:
    key, _ = store.keys.create("ann", ["read"])
    for body in ({"grace_s": -1}, {"grace_s": 1e9}, {"grace": 1}):
        assert client.post(f"/v1/keys/{key.id}/rotate", json=body).status_code == 422
    assert client.post("/v1/keys/none/rotate").status_code == 404
    assert len(store.keys.list()) == 2


@pytest.mark.parametrize(
    ("age_days", "left_days", "told"), [(0, 90, False), (80, 10, True), (0, 1, False), (9, 1, True)]
)
def test_answers_tell_when_a_key_is_near_its_end(
    client: TestClient, redis: redis_py.Redis, age_days: float, left_days: float, told: bool
) -> None:
    made = client.post("/v1/keys", json={"name": "ann", "expires_at": in_days(left_days)}).json()
    entry = orjson.loads(redis.hget(API_KEYS(), made["id"]))
    created_at = entry["created_at"] - round(age_days * 86_400_000)
    redis.hset(API_KEYS(), made["id"], orjson.dumps({**entry, "created_at": created_at}))
    for path in ("/v1/jobs", "/v1/jobs/job_none", "/v1/keys"):
        answer = client.get(path, headers=bearer(made["secret"]))
        assert (EXPIRY_HEADER in answer.headers) == told, path
    if told:
        end = datetime.fromisoformat(client.get("/v1/jobs", headers=bearer(made["secret"])).headers[EXPIRY_HEADER])
        assert abs(end - datetime.fromisoformat(made["expires_at"])) < timedelta(seconds=2)
    assert EXPIRY_HEADER not in client.get("/v1/jobs").headers
