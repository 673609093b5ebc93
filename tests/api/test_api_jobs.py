"""Jobs over REST: submit once, look, wait, cancel, retry, delete."""

from __future__ import annotations

import io
import json
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from api_world import COMPILE, MLP, TRAIN, VERIFY, Keys, Worker, bearer, submit
from fastapi.testclient import TestClient

from service.jobs.store import Store


@pytest.mark.parametrize("spec", [TRAIN, VERIFY, COMPILE], ids=lambda spec: spec["kind"])
def test_a_submitted_job_is_shown_as_it_was_accepted(client: TestClient, spec: dict[str, object]) -> None:
    answer = client.post("/v1/jobs", json={**spec, "name": "mine", "labels": {"team": "a"}, "priority": 3})
    job = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert (job["kind"], job["name"], job["labels"], job["priority"]) == (spec["kind"], "mine", {"team": "a"}, 3)
    assert (job["state"], job["owner"], job["attempt"], job["result"]) == ("queued", "admin", 0, None)
    assert job["spec"]["model"]["hidden"] == [16]
    assert client.get(answer.headers["location"]).json() == job


def test_the_same_idempotency_key_and_body_give_the_same_job(client: TestClient) -> None:
    headers = {"Idempotency-Key": "once"}
    first = client.post("/v1/jobs", json=TRAIN, headers=headers)
    again = client.post("/v1/jobs", json=dict(reversed(TRAIN.items())), headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    assert again.headers["location"] == first.headers["location"]
    assert len(client.get("/v1/jobs").json()["items"]) == 1


def test_the_same_idempotency_key_with_another_body_is_refused(client: TestClient) -> None:
    headers = {"Idempotency-Key": "once"}
    client.post("/v1/jobs", json=TRAIN, headers=headers)
    answer = client.post("/v1/jobs", json={**TRAIN, "steps": 11}, headers=headers)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["path"] == "Idempotency-Key"
    assert answer.json()["errors"][0]["got"] == "once"
    assert len(client.get("/v1/jobs").json()["items"]) == 1


def test_idempotency_keys_of_different_owners_do_not_meet(client: TestClient, keys: Keys) -> None:
    headers = {"Idempotency-Key": "once"}
    mine = client.post("/v1/jobs", json=TRAIN, headers=headers)
    other = client.post("/v1/jobs", json=TRAIN, headers={**headers, **bearer(keys["submit"])})
    assert other.status_code == 201
    assert other.json()["id"] != mine.json()["id"]


def test_listing_filters_and_pages_newest_first(client: TestClient, keys: Keys) -> None:
    ids = [submit(client, name=f"run {i}", labels={"i": str(i)}) for i in range(5)]
    other = client.post("/v1/jobs", json=VERIFY, headers=bearer(keys["submit"])).json()["id"]
    first = client.get("/v1/jobs", params={"limit": 4}).json()
    rest = client.get("/v1/jobs", params={"limit": 4, "cursor": first["next_cursor"]}).json()
    assert [job["id"] for job in first["items"] + rest["items"]] == [other, *reversed(ids)]
    assert rest["next_cursor"] is None

    def found(**params: str) -> list[str]:
        return [job["id"] for job in client.get("/v1/jobs", params=params).json()["items"]]

    assert found(kind="verify") == [other]
    assert found(owner="submit") == [other]
    assert found(label="i=2") == [ids[2]]
    assert found(q="RUN 3") == [ids[3]]
    assert found(state="running") == []


@pytest.mark.parametrize(
    ("params", "path"),
    [
        ({"state": "done"}, "state.0"),
        ({"kind": "x"}, "kind"),
        ({"limit": "0"}, "limit"),
        ({"cursor": "x"}, "cursor"),
        ({"sweep": "all"}, "sweep"),
        ({"needs": "train"}, "needs"),
    ],
)
def test_a_bad_filter_is_refused_by_name(client: TestClient, params: dict[str, str], path: str) -> None:
    answer = client.get("/v1/jobs", params=params)
    assert answer.status_code == 422
    assert [error["path"] for error in answer.json()["errors"]] == [path]
    assert answer.json()["errors"][0]["expected"]


def test_waiting_answers_when_the_job_is_over(client: TestClient, worker: Worker) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    threading.Timer(0.3, worker.succeed, [ref]).start()
    job = client.get(f"/v1/jobs/{job_id}", params={"wait_s": 30}).json()
    assert job["state"] == "succeeded"
    assert job["result"] == {"loss": 0.5}
    assert client.get(f"/v1/jobs/{job_id}", params={"wait_s": 30}).json() == job


def test_waiting_in_vain_answers_with_the_job_as_it_is(client: TestClient) -> None:
    job_id = submit(client)
    started = time.monotonic()
    job = client.get(f"/v1/jobs/{job_id}", params={"wait_s": 0.2}).json()
    assert job["state"] == "queued"
    assert time.monotonic() - started > 0.15


def test_cancelling_a_queued_job_ends_it_at_once_and_retry_queues_it_again(client: TestClient) -> None:
    job_id = submit(client)
    cancelled = client.post(f"/v1/jobs/{job_id}/cancel")
    assert (cancelled.status_code, cancelled.json()["state"]) == (202, "cancelled")
    retried = client.post(f"/v1/jobs/{job_id}/retry")
    assert (retried.status_code, retried.json()["state"]) == (202, "queued")


def test_a_retry_that_would_change_the_job_is_refused_with_what_to_do(client: TestClient, store: Store) -> None:
    job_id = submit(client)
    client.post(f"/v1/jobs/{job_id}/cancel")
    go_on = f", and resume: {{job: {job_id}}} to go on from the last checkpoint"
    for also in ("", go_on):
        refused = client.post(f"/v1/jobs/{job_id}/retry", json={"optimizer": {"lr": 1e-5}})
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["expected"] == f"a new job with the changed spec{also}"
        if not also:
            leave_checkpoint(store, job_id, 4)
    assert client.post(f"/v1/jobs/{job_id}/retry", content=b"lr=1").status_code == 422
    assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "cancelled"
    assert client.post(f"/v1/jobs/{job_id}/retry", json={}).status_code == 202


def test_weights_of_a_job_that_failed_are_taken_and_fetched(client: TestClient, worker: Worker, store: Store) -> None:
    job_id = submit(client)
    worker.fail(worker.start(job_id))
    further = {**TRAIN, "model": {"job": job_id}}
    refused = client.post("/v1/jobs", json=further)
    assert refused.status_code == 422
    assert "has failed and left no checkpoint" in refused.json()["detail"]
    left = leave_checkpoint(store, job_id, 4)
    unknown = client.post("/v1/jobs", json={**TRAIN, "model": {"job": job_id, "step": 3}})
    assert [(error["path"], error["expected"]) for error in unknown.json()["errors"]] == [
        ("model.step", "latest, or one of 4")
    ]
    for named in ({"model": {"job": job_id, "step": 4}}, {"resume": {"job": job_id}}):
        taken = client.post("/v1/jobs", json={**TRAIN, **named})
        assert (taken.status_code, taken.json()["state"]) == (201, "queued")
        assert job_id not in (taken.json()["reason"] or "")  # it does not wait for what has ended
        assert client.post(f"/v1/jobs/{taken.json()['id']}/cancel").json()["state"] == "cancelled"
        assert client.post(f"/v1/jobs/{taken.json()['id']}/retry").status_code == 202
    assert client.delete(f"/v1/jobs/{job_id}").status_code == 409  # it is needed
    (listed,) = client.get(f"/v1/jobs/{job_id}/artifacts").json()["items"]
    assert (listed["name"], listed["bytes"]) == ("checkpoints/step_4", sum(p.stat().st_size for p in left.iterdir()))
    with tarfile.open(fileobj=io.BytesIO(client.get(f"/v1/jobs/{job_id}/artifacts/checkpoints/step_4").content)) as tar:
        assert set(tar.getnames()) == {"step_4/meta.json", "step_4/x.safetensors"}
    assert client.get(f"/v1/jobs/{job_id}/artifacts/checkpoints/step_5").status_code == 404


def leave_checkpoint(store: Store, job_id: str, step: int) -> Path:
    """Write what counts as a complete checkpoint."""
    folder = store.artifacts.data.job(job_id).checkpoints / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "x.safetensors").write_bytes(b"weights")
    (folder / "meta.json").write_text(json.dumps({"step": step, "files": {"x.safetensors": 7}}))
    return folder


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"steps": 4}, "steps"),
        ({"seed": 1}, "seed"),
        ({"batch": {"global": 16}}, "batch.global"),
        ({"data": {"source": "synthetic", "features": 64, "classes": 10}}, "data"),
        ({"model": {**TRAIN["model"], "hidden": [8]}}, "model"),
    ],
)
def test_what_would_not_go_on_where_the_other_job_was_is_refused(
    client: TestClient, worker: Worker, change: dict[str, Any], path: str
) -> None:
    job_id = submit(client)
    worker.fail(worker.start(job_id))
    leave_checkpoint(worker.store, job_id, 4)
    further = {**TRAIN, "resume": {"job": job_id}, "optimizer": {"lr": 1e-5}, "steps": 5, "parallel": {"tp": 2}}
    assert client.post("/v1/jobs", json=further).status_code == 201
    refused = client.post("/v1/jobs", json={**further, **change})
    assert refused.status_code == 422
    assert [error["path"] for error in refused.json()["errors"]] == [path]


def test_a_running_job_is_asked_to_end(client: TestClient, worker: Worker, store: Store) -> None:
    job_id = submit(client)
    ref = worker.start(job_id)
    assert client.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelling"
    assert store.attempts.renew(ref) == "stop"


def test_what_contradicts_the_state_is_a_conflict(client: TestClient, worker: Worker) -> None:
    job_id = submit(client)
    for call in (client.post(f"/v1/jobs/{job_id}/retry"), client.delete(f"/v1/jobs/{job_id}")):
        assert call.status_code == 409
        assert "queued" in call.json()["detail"]
    worker.succeed(worker.start(job_id))
    assert client.post(f"/v1/jobs/{job_id}/cancel").status_code == 409


def test_deleting_a_job_that_is_over_removes_it_and_its_files(client: TestClient, worker: Worker, store: Store) -> None:
    job_id = submit(client)
    worker.succeed(worker.start(job_id))
    folder = store.artifacts.data.job(job_id).artifacts
    folder.mkdir(parents=True)
    (folder / "model").write_text("x")
    answer = client.delete(f"/v1/jobs/{job_id}")
    assert (answer.status_code, answer.content) == (204, b"")
    assert client.get(f"/v1/jobs/{job_id}").status_code == 404
    assert not folder.exists()


@pytest.mark.parametrize("job_id", ["job_0123456789abcdefghij", "nonsense", "job_" + "x" * 300, "%2e%2e"])
@pytest.mark.parametrize(
    "tail", ["", "/events", "/metrics", "/logs", "/bounds", "/report", "/artifacts", "/artifacts/x", "?wait_s=5"]
)
def test_a_job_that_is_not_there_is_not_found(client: TestClient, job_id: str, tail: str) -> None:
    answer = client.get(f"/v1/jobs/{job_id}{tail}")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_only_the_owner_or_an_admin_changes_a_job(client: TestClient, keys: Keys) -> None:
    job_id = submit(client)
    stranger = bearer(keys["submit"])
    for call in (
        client.post(f"/v1/jobs/{job_id}/cancel", headers=stranger),
        client.post(f"/v1/jobs/{job_id}/retry", headers=stranger),
        client.delete(f"/v1/jobs/{job_id}", headers=stranger),
    ):
        assert call.status_code == 403
        assert "admin" in call.json()["detail"]
    theirs = client.post("/v1/jobs", json=TRAIN, headers=stranger).json()["id"]
    same_name = bearer(keys.named("submit", "submit"))
    assert client.post(f"/v1/jobs/{theirs}/cancel", headers=same_name).status_code == 202
    assert client.post(f"/v1/jobs/{theirs}/retry").status_code == 202


def test_jobs_are_deleted_by_filters_a_page_at_a_time(client: TestClient, keys: Keys, worker: Worker) -> None:
    mine = bearer(keys["submit"])

    def ask(expected: int = 200, **params: Any) -> Any:
        answer = client.post("/v1/jobs:delete", params={"label": "paper=a", **params}, headers=mine)
        assert answer.status_code == expected, answer.text
        return answer.json()

    def job(**changes: Any) -> str:
        return submit(client, {**TRAIN, "labels": {"paper": "a"}, **changes})

    own = client.post("/v1/jobs", json={**TRAIN, "labels": {"paper": "a"}}, headers=mine).json()["id"]
    others, unlabelled, waiting = job(), job(labels={}), job()
    for each in (own, others, unlabelled):
        client.post(f"/v1/jobs/{each}/cancel")
    assert ask(dry_run=True)["jobs"] == [own]
    assert ask(ended_before="2026-01-01T00:00:00Z")["jobs"] == []
    assert ask(state="failed")["jobs"] == []
    first = ask(limit=1)
    assert (first["jobs"], [each["job"] for each in first["kept"]]) == ([], [others])
    assert "belongs to" in first["kept"][0]["why"]
    assert ask(limit=1, cursor=first["next_cursor"])["jobs"] == [own]
    assert client.get(f"/v1/jobs/{own}").status_code == 404
    assert [client.get(f"/v1/jobs/{each}").status_code for each in (others, unlabelled, waiting)] == [200] * 3
    assert ask(422, state="running")["errors"][0]["path"] == "state.0"
    for nothing in ("", "?q=", "?sweep=none"):
        unfiltered = client.post(f"/v1/jobs:delete{nothing}").json()
        assert unfiltered["errors"][0]["message"] == "this would delete every job"


def test_what_an_unfinished_job_needs_is_kept_and_said_before(client: TestClient, worker: Worker) -> None:
    needed = submit(client)
    worker.succeed(worker.start(needed))
    user = submit(client, VERIFY, model={"job": needed})
    for dry_run in (True, False):
        answer = client.post("/v1/jobs:delete", params={"state": "succeeded", "dry_run": dry_run}).json()
        assert answer == {
            "jobs": [],
            "kept": [{"job": needed, "why": f"job {needed} is needed by {user}"}],
            "next_cursor": None,
        }


def test_a_job_waits_for_those_it_names_and_fails_with_them(client: TestClient, worker: Worker) -> None:
    first = submit(client)
    second = submit(client, VERIFY, model={"job": first})
    assert first in client.get(f"/v1/jobs/{second}").json()["reason"]
    worker.fail(worker.start(first))
    job = client.get(f"/v1/jobs/{second}").json()
    assert (job["state"], job["error"]["type"]) == ("failed", "DependencyFailed")


def test_a_model_that_cannot_be_cut_is_refused_with_its_arithmetic(client: TestClient) -> None:
    answer = client.post("/v1/jobs", json={**TRAIN, "model": {**MLP, "hidden": [15]}, "parallel": {"tp": 2}})
    assert answer.status_code == 422
    error = answer.json()["errors"][0]
    assert (error["path"], error["got"]) == ("model.hidden.0", 15)
    assert "multiple of 2" in error["expected"]
