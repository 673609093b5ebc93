"""Batches over REST: all jobs or none, each refused by its index, one request however often it is sent."""

from __future__ import annotations

from typing import Any

import pytest
from api_world import COMPILE, TRAIN, VERIFY, Keys, Worker, bearer, submit
from fastapi.testclient import TestClient

from service.jobs.store import Store

NOBODY = "job_" + "0" * 20


def send(client: TestClient, *specs: dict[str, Any], **headers: str) -> Any:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post("/v1/jobs:batch", json={"jobs": list(specs)}, headers=sent)


def count(client: TestClient) -> int:
    return len(client.get("/v1/jobs", params={"limit": 1000}).json()["items"])


def test_jobs_of_a_batch_are_jobs_like_others_in_the_order_of_their_specs(client: TestClient) -> None:
    answer = send(client, TRAIN, {**VERIFY, "name": "second"}, COMPILE)
    assert answer.status_code == 201, answer.text
    items = answer.json()["items"]
    assert [item["created"] for item in items] == [True] * 3
    jobs = [client.get(f"/v1/jobs/{item['id']}").json() for item in items]
    assert [(job["kind"], job["name"], job["state"]) for job in jobs] == [
        ("train", "train", "queued"),
        ("verify", "second", "queued"),
        ("compile", "compile", "queued"),
    ]
    assert sorted(item["id"] for item in items) == [item["id"] for item in items]


@pytest.mark.slow
def test_a_thousand_jobs_are_one_request_and_one_more_is_too_many(client: TestClient, store: Store) -> None:
    small = {**VERIFY, "property": {"box": {"lower": [0.0] * 64, "upper": [0.1] * 64}}}
    assert len({item["id"] for item in send(client, *[small] * 1000).json()["items"]}) == 1000
    assert count(client) == 1000
    refused = send(client, *[small] * 1001)
    assert refused.status_code == 422
    assert [error["path"] for error in refused.json()["errors"]] == ["jobs"]
    assert send(client).json()["errors"][0]["path"] == "jobs"


def test_where_one_is_refused_none_is_submitted_and_each_is_named(client: TestClient) -> None:
    malformed = send(client, TRAIN, {**TRAIN, "stepps": 3}, {**TRAIN, "optimizer": {"lr": -1}})
    assert malformed.status_code == 422
    assert [error["path"] for error in malformed.json()["errors"]] == ["jobs.1.stepps", "jobs.2.optimizer.lr"]
    assert "did you mean 'steps'" in malformed.json()["errors"][0]["message"]
    impossible = send(client, {**TRAIN, "after": [NOBODY]}, TRAIN, {**TRAIN, "parallel": {"pp": 9}})
    paths = [error["path"] for error in impossible.json()["errors"]]
    assert paths[0] == "jobs.0.after.0"
    assert "jobs.2.parallel.pp" in paths
    assert not [path for path in paths if path.startswith("jobs.1")]
    assert count(client) == 0


def test_a_batch_sent_again_under_its_key_gives_the_same_jobs(client: TestClient) -> None:
    first, again = (send(client, TRAIN, VERIFY, Idempotency_Key="once") for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert [item["id"] for item in again.json()["items"]] == [item["id"] for item in first.json()["items"]]
    assert not any(item["created"] for item in again.json()["items"])
    other = send(client, TRAIN, COMPILE, Idempotency_Key="once")
    assert other.status_code == 422
    assert other.json()["errors"][0]["path"] == "Idempotency-Key"
    assert count(client) == 2


def test_of_a_batch_whose_job_was_deleted_only_that_one_is_submitted_anew(client: TestClient) -> None:
    first = send(client, TRAIN, VERIFY, Idempotency_Key="once").json()["items"]
    client.post(f"/v1/jobs/{first[1]['id']}/cancel")
    assert client.delete(f"/v1/jobs/{first[1]['id']}").status_code == 204
    again = send(client, TRAIN, VERIFY, Idempotency_Key="once")
    assert again.status_code == 201
    assert again.json()["items"][0] == {"id": first[0]["id"], "created": False}
    assert again.json()["items"][1]["created"]


def test_the_key_of_a_batch_is_none_of_a_single_job(client: TestClient) -> None:
    batch = send(client, TRAIN, Idempotency_Key="once").json()["items"][0]["id"]
    single = client.post("/v1/jobs", json=TRAIN, headers={"Idempotency-Key": "once"})
    assert single.status_code == 201
    assert single.json()["id"] != batch


def test_a_dependency_that_ends_between_check_and_write_refuses_the_whole_batch(
    client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = submit(client)

    async def ends_meanwhile(*_: Any) -> list[Any]:
        store.jobs.cancel(needed)
        return []

    monkeypatch.setattr("api.offload.checker.Checker.problems", ends_meanwhile)
    answer = send(client, TRAIN, {**TRAIN, "after": [needed]})
    assert answer.status_code == 422
    assert [error["path"] for error in answer.json()["errors"]] == ["jobs.1.after.0"]
    assert count(client) == 1


def test_jobs_of_a_batch_wait_for_what_they_need(client: TestClient, worker: Worker) -> None:
    needed = submit(client)
    first, second = (item["id"] for item in send(client, {**TRAIN, "after": [needed]}, TRAIN).json()["items"])
    assert client.get(f"/v1/jobs/{first}").json()["reason"] == f"waits for {needed}"
    assert client.get(f"/v1/jobs/{second}").json()["reason"] != f"waits for {needed}"
    worker.fail(worker.start(needed))
    assert client.get(f"/v1/jobs/{first}").json()["state"] == "failed"


def test_a_body_of_nothing_but_errors_is_answered_in_few_words(client: TestClient) -> None:
    answer = client.post("/v1/jobs:batch", json={"jobs": [{**TRAIN, "model": {"hidden": ["x"] * 900}}] * 100})
    assert answer.status_code == 422
    assert len(answer.json()["errors"]) <= 51
    assert len(answer.content) < 50_000


def test_a_read_key_submits_no_batch(client: TestClient, keys: Keys) -> None:
    assert send(client, TRAIN, **bearer(keys["read"])).status_code == 403
    assert count(client) == 0
