"""Plain submissions are answered ahead of the framework, and by nothing can be told from its own answers."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from api_world import TRAIN, Keys, bearer
from fastapi.testclient import TestClient

from api.front import plain_submissions
from service.jobs.store import AuditFilter, Store, StoreUnavailable, Submission

OF_A_JOB = ("id", "created_at")
OF_AN_ANSWER = {"x-request-id", "date", "location", "content-length"}
"""What differs between any two answers."""
FRAMEWORK = {"params": {"project": "default"}}
"""Makes a submission of the default project one that the framework answers."""


@pytest.fixture
def taken_ahead(monkeypatch: pytest.MonkeyPatch) -> list[Submission | None]:
    """What is submitted ahead, and ``None`` for each request that was left to the framework after a look."""
    found: list[Submission | None] = []
    look = plain_submissions._submission

    async def noted(*arguments: Any) -> Submission | None:
        found.append(await look(*arguments))
        return found[-1]

    monkeypatch.setattr(plain_submissions, "_submission", noted)
    return found


def told(answer: httpx2.Response) -> tuple[int, Any, dict[str, str]]:
    body = answer.json()
    if answer.status_code == 201:
        assert answer.headers["location"] == f"/v1/jobs/{body['id']}"
    else:
        assert body.pop("request_id", None) in (None, answer.headers["x-request-id"])
    headers = {name: value for name, value in answer.headers.items() if name not in OF_AN_ANSWER}
    return answer.status_code, {name: value for name, value in body.items() if name not in OF_A_JOB}, headers


@pytest.mark.parametrize("scope", ["submit", "admin"])
def test_both_accept_the_same_job(
    running: TestClient, keys: Keys, store: Store, taken_ahead: list[Submission | None], scope: str
) -> None:
    spec, headers = {**TRAIN, "name": "ö", "labels": {"a": "b"}}, bearer(keys[scope])
    ahead = running.post("/v1/jobs", json=spec, headers=headers)
    assert [each is not None for each in taken_ahead] == [True]
    assert told(ahead) == told(running.post("/v1/jobs", json=spec, headers=headers, **FRAMEWORK))
    assert len(taken_ahead) == 1
    assert running.get(ahead.headers["location"], headers=headers).json() == ahead.json()
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
    running: TestClient, keys: Keys, taken_ahead: list[Submission | None], content: bytes
) -> None:
    headers = {**bearer(keys["submit"]), "Content-Type": "application/json"}
    refused = running.post("/v1/jobs", content=content, headers=headers)
    assert taken_ahead == [None]
    assert told(refused) == told(running.post("/v1/jobs", content=content, headers=headers, **FRAMEWORK))


@pytest.mark.parametrize("named", ["read", "nobody"])
def test_a_key_that_may_not_is_refused_by_the_framework(
    running: TestClient, keys: Keys, taken_ahead: list[Submission | None], named: str
) -> None:
    headers = bearer(keys["read"] if named == "read" else f"tvt_{'0' * 16}_none")
    refused = running.post("/v1/jobs", json=TRAIN, headers=headers)
    assert taken_ahead == [None]
    assert told(refused) == told(running.post("/v1/jobs", json=TRAIN, headers=headers, **FRAMEWORK))


def test_a_job_that_could_not_run_is_refused_alike(
    running: TestClient, keys: Keys, taken_ahead: list[Submission | None]
) -> None:
    spec, headers = {**TRAIN, "model": {**TRAIN["model"], "in_features": 63}}, bearer(keys["submit"])
    refused = running.post("/v1/jobs", json=spec, headers=headers)
    assert refused.status_code == 422
    assert taken_ahead[0] is not None
    assert told(refused) == told(running.post("/v1/jobs", json=spec, headers=headers, **FRAMEWORK))


@pytest.mark.parametrize(
    "fields",
    [
        {"after": ["job_" + "0" * 20]},
        {"sweep": {"seed": [0, 1]}},
        {"data": {"source": "file", "file": "file_" + "0" * 64}},
    ],
)
def test_specs_that_name_others_are_the_frameworks(
    running: TestClient, keys: Keys, taken_ahead: list[Submission | None], fields: dict[str, Any]
) -> None:
    headers, spec = bearer(keys["submit"]), {**TRAIN, **fields}
    assert told(running.post("/v1/jobs", json=spec, headers=headers))[0] in (201, 422)
    assert taken_ahead == [None]


def test_a_key_for_idempotency_and_other_bodies_are_the_frameworks(
    running: TestClient, keys: Keys, taken_ahead: list[Submission | None]
) -> None:
    headers = bearer(keys["submit"])
    twice = [
        running.post("/v1/jobs", json=TRAIN, headers={**headers, "Idempotency-Key": "one"}).status_code for _ in "ab"
    ]
    assert twice == [201, 200]
    assert running.post("/v1/jobs", content=b"kind: train", headers=headers).status_code in (415, 422)
    assert taken_ahead == []


def test_a_broker_that_goes_away_is_told_of_alike(
    running: TestClient, keys: Keys, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*arguments: Any) -> None:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(type(store.jobs), "accept", away)
    headers = bearer(keys["submit"])
    refused = running.post("/v1/jobs", json=TRAIN, headers=headers)
    assert refused.status_code == 503
    assert told(refused) == told(running.post("/v1/jobs", json=TRAIN, headers=headers, **FRAMEWORK))
