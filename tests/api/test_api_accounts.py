"""Service accounts through the API."""

from __future__ import annotations

from api_world import TRAIN, bearer
from fastapi.testclient import TestClient

from api.callers.security import SESSION_COOKIE


def test_an_account_owns_the_jobs_of_all_its_keys(client: TestClient) -> None:
    assert client.post("/v1/accounts", json={"name": "ci", "project": "vision"}).status_code == 404
    client.post("/v1/projects", json={"name": "vision"})
    assert client.post("/v1/accounts", json={"name": "ci", "project": "vision"}).status_code == 201
    one, other = (client.post("/v1/accounts/ci/keys").json() for _ in range(2))
    job = client.post("/v1/jobs", json=TRAIN, headers=bearer(one["secret"])).json()
    assert (job["owner"], job["project"]) == ("ci", "vision")
    assert client.post(f"/v1/jobs/{job['id']}/cancel", headers=bearer(other["secret"])).status_code == 202
    (listed,) = client.get("/v1/accounts").json()["items"]
    assert {key["id"] for key in listed["keys"]} == {one["id"], other["id"]}
    assert "secret" not in str(listed)
    assert client.post("/v1/accounts/ci/disable").json()["disabled"] is True
    assert client.get("/v1/jobs", headers=bearer(one["secret"])).status_code == 401
    assert client.post("/v1/accounts/ci/keys").status_code == 409
    assert client.post("/v1/accounts/ci/enable").json()["disabled"] is False
    assert client.get("/v1/jobs", headers=bearer(one["secret"])).status_code == 200
    assert client.delete("/v1/accounts/ci").status_code == 204
    assert client.get("/v1/jobs", headers=bearer(one["secret"])).status_code == 401


def test_a_key_of_an_account_begins_no_session(client: TestClient) -> None:
    client.post("/v1/accounts", json={"name": "ci"})
    secret = client.post("/v1/accounts/ci/keys").json()["secret"]
    answer = client.post("/login", data={"key": secret}, headers={"X-Trivet": "1"})
    assert (answer.status_code, SESSION_COOKIE in answer.cookies) == (403, False)
    assert "begins no session" in answer.json()["detail"]
    (refusal,) = client.get("/v1/audit", params={"action": "permission.refuse"}).json()["items"]
    assert refusal["actor"] == "ci"


def test_what_is_wrong_is_refused(client: TestClient) -> None:
    client.post("/v1/accounts", json={"name": "ci"})
    assert client.post("/v1/accounts", json={"name": "ci"}).status_code == 409
    assert client.post("/v1/keys", json={"name": "ci"}).status_code == 409
    assert client.post("/v1/accounts", json={"name": "admin"}).status_code == 409
    assert client.post("/v1/accounts", json={"name": "c i"}).status_code == 422
    assert client.post("/v1/accounts/none/keys").status_code == 404
    assert client.post("/v1/accounts/none/disable").status_code == 404
    assert client.delete("/v1/accounts/none").status_code == 404
