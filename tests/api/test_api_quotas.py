"""Quotas: what a project may have, and what a refusal says."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from api_world import TRAIN, Keys, Worker, bearer
from fastapi.testclient import TestClient

from service.jobs.records import Artifact, AttemptRef
from service.jobs.store import Store


@pytest.fixture
def ann(keys: Keys) -> dict[str, str]:
    return bearer(keys.of("vision", "submit", "ann"))


def limit(client: TestClient, **quotas: float | None) -> dict[str, Any]:
    answer = client.patch("/v1/projects/vision", json={"quotas": quotas})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_no_more_jobs_are_queued_than_the_quota(client: TestClient, keys: Keys, ann: dict[str, str]) -> None:
    limit(client, queued_jobs=2)
    first = client.post("/v1/jobs", json=TRAIN, headers=ann).json()["id"]
    bob = bearer(keys.of("vision", "submit", "bob"))
    assert client.post("/v1/jobs", json=TRAIN, headers=bob).status_code == 201
    refused = client.post("/v1/jobs", json=TRAIN, headers={**ann, "Idempotency-Key": "k"})
    assert refused.status_code == 429
    detail = refused.json()["detail"]
    assert "2 of 2 queued jobs" in detail
    assert "ann has 1" in detail
    assert "bob has 1" in detail
    shown = client.get("/v1/projects/vision", headers=ann).json()
    assert (shown["quotas"]["queued_jobs"], shown["usage"]["queued_jobs"]) == (2, 2)
    client.post(f"/v1/jobs/{first}/cancel", headers=ann)
    assert client.post("/v1/jobs", json=TRAIN, headers=ann).status_code == 201
    assert client.post("/v1/jobs", json=TRAIN).status_code == 201  # of another project


def test_a_retry_counts_like_a_submission(client: TestClient, ann: dict[str, str]) -> None:
    first, second = (client.post("/v1/jobs", json=TRAIN, headers=ann).json()["id"] for _ in range(2))
    high = client.post("/v1/jobs", json={**TRAIN, "priority": 7}, headers=ann).json()["id"]
    for job_id in (first, second, high):
        client.post(f"/v1/jobs/{job_id}/cancel", headers=ann)
    limit(client, queued_jobs=1, highest_priority=5)
    refused = client.post(f"/v1/jobs/{high}/retry", headers=ann)
    assert refused.status_code == 429
    assert "at most 5, its highest_priority" in refused.json()["detail"]
    assert client.post(f"/v1/jobs/{first}/retry", headers=ann).status_code == 202
    refused = client.post(f"/v1/jobs/{second}/retry", headers=ann)
    assert (refused.status_code, "at most 1, its queued_jobs" in refused.json()["detail"]) == (429, True)
    limit(client, queued_jobs=None, artifact_bytes=0)
    refused = client.post(f"/v1/jobs/{second}/retry", headers=ann)
    assert (refused.status_code, "at most 0, its artifact_bytes" in refused.json()["detail"]) == (429, True)


def test_a_retried_sweep_counts_all_its_jobs(client: TestClient, ann: dict[str, str]) -> None:
    sweep = client.post("/v1/jobs", json={**TRAIN, "sweep": {"grid": {"seed": [1, 2, 3]}}}, headers=ann).json()["id"]
    client.post(f"/v1/jobs/{sweep}/cancel", headers=ann)
    limit(client, queued_jobs=2)
    assert client.post(f"/v1/jobs/{sweep}/retry", headers=ann).status_code == 429
    limit(client, queued_jobs=3)
    assert client.post(f"/v1/jobs/{sweep}/retry", headers=ann).status_code == 202


def test_a_parent_is_judged_by_its_jobs(client: TestClient, ann: dict[str, str]) -> None:
    """A chain has no time limit, and a parent is never queued; what its jobs may not have is still refused."""
    limit(client, queued_jobs=2, longest_time_s=60)
    jobs = {"first": {**TRAIN, "timeout_s": 60}, "second": {**TRAIN, "timeout_s": 61}}
    (error,) = client.post("/v1/jobs", json={"kind": "chain", "jobs": jobs}, headers=ann).json()["errors"]
    assert (error["path"], error["got"]) == ("jobs.second.timeout_s", 61)
    jobs["second"]["timeout_s"] = 60
    assert client.post("/v1/jobs", json={"kind": "chain", "jobs": jobs}, headers=ann).status_code == 201
    limit(client, queued_jobs=4)
    sweep = {**TRAIN, "sweep": {"grid": {"timeout_s": [30, 60]}}}
    assert client.post("/v1/jobs", json=sweep, headers=ann).status_code == 201
    limit(client, queued_jobs=5)
    assert client.post("/v1/jobs", json=sweep, headers=ann).status_code == 429


def test_a_batch_counts_as_a_whole(client: TestClient, ann: dict[str, str]) -> None:
    limit(client, queued_jobs=2)
    assert client.post("/v1/jobs:batch", json={"jobs": [TRAIN] * 3}, headers=ann).status_code == 429
    assert client.get("/v1/jobs", headers=ann).json()["items"] == []
    assert client.post("/v1/jobs:batch", json={"jobs": [TRAIN] * 2}, headers=ann).status_code == 201


@pytest.mark.parametrize(
    ("quota", "fits", "over", "path", "accepted"),
    [
        ({"highest_priority": 5}, {"priority": 5}, {"priority": 6}, "priority", "at most 5, "),
        ({"longest_time_s": 60}, {"timeout_s": 60}, {"timeout_s": 61}, "timeout_s", "at most 60 s, "),
        ({"longest_time_s": 60}, {"timeout_s": 1}, {}, "timeout_s", "at most 60 s, "),
        ({"devices": 1}, {}, {"parallel": {"dp_shard": 2}}, "parallel", "at most 1, "),
    ],
)
def test_a_field_beyond_its_quota_is_named(
    client: TestClient, ann: dict[str, str], *, quota: Any, fits: Any, over: Any, path: str, accepted: str
) -> None:
    limit(client, **quota)
    assert client.post("/v1/jobs", json={**TRAIN, **fits}, headers=ann).status_code == 201
    refused = client.post("/v1/jobs", json={**TRAIN, **over}, headers=ann)
    assert refused.status_code == 422
    (error,) = refused.json()["errors"]
    assert error["path"] == path
    assert error["got"] == (2 if path == "parallel" else over.get(path))
    assert "vision" in error["message"]
    assert error["expected"] == f"{accepted}its {next(iter(quota))}"
    limit(client, **dict.fromkeys(quota))
    assert client.post("/v1/jobs", json={**TRAIN, **over}, headers=ann).status_code == 201


def test_uploads_are_bounded_together(client: TestClient, ann: dict[str, str]) -> None:
    limit(client, upload_bytes=10)
    assert client.post("/v1/files", content=b"x" * 10, headers=ann).status_code == 201
    refused = client.post("/v1/files", content=b"y", headers=ann)
    assert refused.status_code == 429
    assert "10 of 10 bytes" in refused.json()["detail"]
    assert client.post("/v1/files", content=b"x" * 10, headers=ann).status_code == 201
    shown = client.get("/v1/projects/vision", headers=ann).json()
    assert shown["usage"]["upload_bytes"] == 10


def test_a_job_that_names_no_time_limit_gets_the_default(client: TestClient, ann: dict[str, str]) -> None:
    headers = {**ann, "Idempotency-Key": "k"}
    limit(client, default_time_s=30, longest_time_s=60)
    job = client.post("/v1/jobs", json=TRAIN, headers=headers).json()
    assert job["spec"]["timeout_s"] == 30
    limit(client, default_time_s=40)
    assert client.post("/v1/jobs", json=TRAIN, headers=headers).json()["id"] == job["id"]
    own = client.post("/v1/jobs", json={**TRAIN, "timeout_s": 50}, headers=ann).json()
    assert own["spec"]["timeout_s"] == 50
    ids = client.post("/v1/jobs:batch", json={"jobs": [TRAIN, TRAIN]}, headers=ann).json()["items"]
    shown = [client.get(f"/v1/jobs/{each['id']}", headers=ann).json() for each in ids]
    assert [each["spec"]["timeout_s"] for each in shown] == [40, 40]
    sweep = {**TRAIN, "sweep": {"grid": {"steps": [1, 2]}}}
    parent = client.post("/v1/jobs", json=sweep, headers=ann).json()["id"]
    children = client.get("/v1/jobs", params={"sweep": parent, "include": "spec"}, headers=ann).json()["items"]
    assert [child["spec"]["timeout_s"] for child in children] == [40, 40]
    assert client.post("/v1/jobs", json=TRAIN).json()["spec"]["timeout_s"] is None  # of another project


def test_a_job_that_its_quota_keeps_waiting_says_so(client: TestClient, ann: dict[str, str], worker: Worker) -> None:
    limit(client, devices=1, device_hours=5)
    first, second = (client.post("/v1/jobs", json=TRAIN, headers=ann).json()["id"] for _ in range(2))
    worker.start(first)
    reason = "project vision uses 1 of 1 devices, and this job needs 1"
    assert client.get(f"/v1/jobs/{second}", headers=ann).json()["reason"] == reason
    (line,) = client.get("/v1/queue", headers=ann).json()["items"]
    assert (line["reason"], line["start"]) == (reason, None)
    usage = client.get("/v1/projects/vision", headers=ann).json()["usage"]
    assert (usage["devices"], usage["device_hours"]) == (1, pytest.approx(0, abs=1))
    limit(client, devices=2)
    worker.start(second)


def publish(store: Store, ref: AttemptRef, name: str, size: int) -> None:
    made = Artifact(name=name, bytes=size, sha256="0" * 64, media_type="text/plain", created_at=datetime.now(UTC))
    store.attempts.record_artifact(ref, made)


def test_no_more_jobs_once_artifacts_have_their_quota(client: TestClient, ann: dict[str, str], worker: Worker) -> None:
    limit(client, artifact_bytes=10)
    small, large = (client.post("/v1/jobs", json=TRAIN, headers=ann).json()["id"] for _ in range(2))
    refs = {job: worker.start(job) for job in (small, large)}
    publish(worker.store, refs[small], "a", 9)
    assert client.post("/v1/jobs", json=TRAIN, headers=ann).status_code == 201
    publish(worker.store, refs[small], "a", 4)
    publish(worker.store, refs[large], "a", 6)
    publish(worker.store, refs[large], "b", 1)
    for body in (TRAIN, {**TRAIN, "sweep": {"grid": {"steps": [1, 2]}}}):
        refused = client.post("/v1/jobs", json=body, headers=ann)
        assert refused.status_code == 429
        said = f"'vision' has 11 of 10 bytes of artifacts and events; the largest: {large} has 7, {small} has 4; "
        assert said in refused.json()["detail"]
    assert client.get("/v1/projects/vision", headers=ann).json()["usage"]["artifact_bytes"] == 11
    assert client.post("/v1/jobs", json=TRAIN).status_code == 201  # of another project
    worker.succeed(refs[large])
    assert client.delete(f"/v1/jobs/{large}", headers=ann).status_code == 204
    assert client.post("/v1/jobs", json=TRAIN, headers=ann).status_code == 201
    assert client.get("/v1/projects/vision", headers=ann).json()["usage"]["artifact_bytes"] == 4


@pytest.mark.parametrize(
    "quotas",
    [
        {"queued_jobs": -1},
        {"highest_priority": 101},
        {"upload_byte": 1},
        {"default_time_s": 0},
        {"devices": -1},
        {"device_hours": -1},
        {"artifact_bytes": -1},
        {"default_time_s": 61, "longest_time_s": 60},
    ],
)
def test_quotas_that_make_no_sense_are_refused(client: TestClient, ann: dict[str, str], quotas: Any) -> None:
    assert client.patch("/v1/projects/vision", json={"quotas": quotas}).status_code == 422
