"""Sweeps over REST: one submission, a parent whose state follows from its jobs, and refusals in the user's terms."""

from __future__ import annotations

from typing import Any

import pytest
from api_world import TRAIN, VERIFY, Keys, Worker, bearer, job_of, submit
from fastapi.testclient import TestClient

from service.jobs.spec.common import STATES
from service.jobs.store import Store

GRID = {"grid": {"optimizer.lr": [0.1, 0.2], "seed": [1, 2]}, "best": {"metric": "loss", "mode": "min"}}


def sweep(client: TestClient, wanted: dict[str, Any] = GRID, **changes: Any) -> str:
    return submit(client, {**TRAIN, "sweep": wanted}, **changes)


def jobs_of(client: TestClient, parent: str) -> list[dict[str, Any]]:
    """The jobs of a sweep, in the order of their values."""
    page = client.get("/v1/jobs", params={"sweep": parent, "limit": 1000, "include": "spec"}).json()
    return list(reversed(page["items"]))


def counts(client: TestClient, parent: str) -> dict[str, int]:
    children = job_of(client, parent)["children"]
    return {state: count for state, count in children.items() if isinstance(count, int) and count}


def test_a_sweep_is_a_parent_and_a_job_for_each_combination(client: TestClient) -> None:
    parent = job_of(client, sweep(client, labels={"team": "a"}))
    assert (parent["state"], parent["kind"], parent["sweep"], parent["placement"]) == ("running", "train", None, [])
    assert parent["progress"] == {**parent["progress"], "done": 0, "total": 4, "unit": "jobs"}
    assert counts(client, parent["id"]) == {"total": 4, "queued": 4}
    jobs = jobs_of(client, parent["id"])
    assert [job["parameters"] for job in jobs] == [
        {"optimizer.lr": lr, "seed": seed} for lr in (0.1, 0.2) for seed in (1, 2)
    ]
    for job in jobs:
        assert (job["sweep"], job["state"], job["children"]) == (parent["id"], "queued", None)
        assert (job["spec"]["optimizer"]["lr"], job["spec"]["seed"]) == tuple(job["parameters"].values())
        assert (job["spec"]["sweep"], job["labels"]) == (None, {"team": "a"})
    assert len(client.get("/v1/jobs").json()["items"]) == 5


def test_a_sweep_succeeds_with_all_its_jobs_and_names_the_best(client: TestClient, worker: Worker) -> None:
    parent = sweep(client)
    jobs = jobs_of(client, parent)
    for job, loss in zip(jobs, (0.5, 2 / 7, 2 / 7, 0.3), strict=True):
        assert job_of(client, parent)["state"] == "running"
        worker.succeed(worker.start(job["id"]), {"loss": loss})
    over = client.get(f"/v1/jobs/{parent}", params={"wait_s": 30}).json()
    assert (over["state"], over["progress"]["done"]) == ("succeeded", 4)
    assert over["children"]["best"] == {"job": jobs[1]["id"], "value": 2 / 7}
    assert over["ended_at"]
    told = [event["type"] for event in client.get(f"/v1/jobs/{parent}/events").json()["items"]]
    assert (told.count("progress"), told.count("state"), told[-1]) == (5, 3, "state")


def test_a_metric_that_no_result_has_names_no_best(client: TestClient, worker: Worker) -> None:
    parent = sweep(client, {"list": [{"seed": 1}], "best": {"metric": "eval.accuracy", "mode": "max"}})
    worker.succeed(worker.start(jobs_of(client, parent)[0]["id"]), {"eval": 3, "loss": 1.0})
    assert job_of(client, parent)["children"]["best"] is None
    assert job_of(client, parent)["state"] == "succeeded"


def test_failed_jobs_fail_the_sweep_and_are_retried_with_it(client: TestClient, worker: Worker) -> None:
    parent = sweep(client, {"grid": {"seed": [1, 2, 3]}})
    first, second, third = (job["id"] for job in jobs_of(client, parent))
    worker.fail(worker.start(first))
    worker.succeed(worker.start(second))
    assert client.post(f"/v1/jobs/{parent}/retry").status_code == 409
    worker.fail(worker.start(third))
    over = job_of(client, parent)
    assert (over["state"], over["error"]["message"]) == ("failed", "2 of its 3 jobs failed")
    again = client.post(f"/v1/jobs/{parent}/retry")
    assert (again.status_code, again.json()["state"], again.json()["error"]) == (202, "running", None)
    assert counts(client, parent) == {"total": 3, "queued": 2, "succeeded": 1}
    assert again.json()["progress"]["done"] == 1
    for job_id in (first, third):
        worker.succeed(worker.start(job_id))
    assert job_of(client, parent)["state"] == "succeeded"


def test_a_sweep_of_two_hundred_of_which_a_quarter_fails_is_retried_for_that_quarter(
    client: TestClient, worker: Worker
) -> None:
    parent = sweep(client, {"grid": {"seed": list(range(200))}, "best": GRID["best"]})
    jobs = jobs_of(client, parent)
    assert [job["parameters"]["seed"] for job in jobs] == list(range(200))
    failing = [job["id"] for job in jobs if job["parameters"]["seed"] % 4 == 0]
    for job in jobs:
        ref = worker.start(job["id"])
        if job["id"] in failing:
            worker.fail(ref)
        else:
            worker.succeed(ref, {"loss": 200.0 - job["parameters"]["seed"]})
    over = job_of(client, parent)
    assert (over["state"], over["error"]["message"]) == ("failed", "50 of its 200 jobs failed")
    assert counts(client, parent) == {"total": 200, "failed": 50, "succeeded": 150}
    assert over["children"]["best"] == {"job": jobs[199]["id"], "value": 1.0}
    client.post(f"/v1/jobs/{parent}/retry")
    assert counts(client, parent) == {"total": 200, "queued": 50, "succeeded": 150}
    for job_id in failing:
        worker.succeed(worker.start(job_id), {"loss": 0.5})
    assert job_of(client, parent)["state"] == "succeeded"


def test_one_job_that_is_retried_reopens_its_sweep(client: TestClient, worker: Worker) -> None:
    parent = sweep(client, {"grid": {"seed": [1, 2]}})
    first, second = (job["id"] for job in jobs_of(client, parent))
    worker.succeed(worker.start(first))
    client.post(f"/v1/jobs/{second}/cancel")
    assert job_of(client, parent)["state"] == "cancelled"
    client.post(f"/v1/jobs/{second}/retry")
    assert (job_of(client, parent)["state"], job_of(client, parent)["ended_at"]) == ("running", None)
    worker.succeed(worker.start(second))
    assert job_of(client, parent)["state"] == "succeeded"


def test_a_cancel_ends_all_jobs_of_a_sweep(client: TestClient, worker: Worker, store: Store) -> None:
    parent = sweep(client, {"grid": {"seed": [1, 2, 3]}})
    first, second, third = (job["id"] for job in jobs_of(client, parent))
    worker.succeed(worker.start(first))
    running = worker.start(second)
    assert client.post(f"/v1/jobs/{parent}/cancel").json()["state"] == "cancelling"
    assert (job_of(client, second)["state"], job_of(client, third)["state"]) == ("cancelling", "cancelled")
    assert store.attempts.renew(running) == "stop"
    refused = client.post(f"/v1/jobs/{third}/retry")
    assert (refused.status_code, "is being cancelled" in refused.json()["detail"]) == (409, True)
    worker.fail(running)
    assert job_of(client, parent)["state"] == "cancelled"
    assert counts(client, parent) == {"total": 3, "succeeded": 1, "cancelled": 2}


def test_a_sweep_whose_jobs_all_wait_is_cancelled_at_once(client: TestClient) -> None:
    parent = sweep(client, after=[submit(client)])
    assert client.post(f"/v1/jobs/{parent}/cancel").json()["state"] == "cancelled"
    assert counts(client, parent) == {"total": 4, "cancelled": 4}


def test_what_needs_a_sweep_waits_for_all_its_jobs(client: TestClient, worker: Worker) -> None:
    parent = sweep(client, {"grid": {"seed": [1, 2]}})
    after = submit(client, after=[parent])
    first, second = (job["id"] for job in jobs_of(client, parent))
    worker.succeed(worker.start(first))
    assert job_of(client, after)["reason"] == f"waits for {parent}"
    worker.succeed(worker.start(second))
    assert job_of(client, after)["reason"] != f"waits for {parent}"
    needed = submit(client)
    failing = sweep(client, after=[needed])
    last = submit(client, after=[failing])
    client.post(f"/v1/jobs/{needed}/cancel")
    assert [job_of(client, job_id)["state"] for job_id in (failing, last)] == ["failed", "failed"]


def test_a_model_comes_from_a_job_of_a_sweep_and_not_from_the_sweep(client: TestClient) -> None:
    parent = sweep(client)
    refused = client.post("/v1/jobs", json={**VERIFY, "model": {"job": parent}})
    assert refused.status_code == 422
    assert [error["path"] for error in refused.json()["errors"]] == ["model.job"]
    assert "sweep" in refused.json()["errors"][0]["message"]
    submit(client, VERIFY, model={"job": jobs_of(client, parent)[0]["id"]})


def test_a_sweep_is_deleted_with_its_jobs_and_only_as_a_whole(client: TestClient) -> None:
    parent = sweep(client)
    child = jobs_of(client, parent)[0]["id"]
    client.post(f"/v1/jobs/{parent}/cancel")
    refused = client.delete(f"/v1/jobs/{child}")
    assert (refused.status_code, parent in refused.json()["detail"]) == (409, True)
    user = submit(client)
    assert client.delete(f"/v1/jobs/{parent}").status_code == 204
    assert [job["id"] for job in client.get("/v1/jobs").json()["items"]] == [user]


@pytest.mark.parametrize(
    ("wanted", "path", "said"),
    [
        ({"grid": {"optimizer.lrr": [0.1, 0.2]}}, "sweep.grid.optimizer.lrr", "did you mean 'lr'"),
        ({"grid": {"seed": [1, "x"]}}, "sweep.grid.seed", "valid integer"),
        ({"list": [{"seed": 1}, {"stepps": 3}]}, "sweep.list.1.stepps", "did you mean 'steps'"),
        ({"zip": {"steps.a": [1]}}, "sweep.zip.steps.a", "would be a part of 10"),
        ({"grid": {"parallel.tp": [1, 7]}}, "model.hidden.0", "with parallel.tp=7"),
        ({"grid": {"seed": [1]}, "list": []}, "sweep.list", "at least 1"),
        ({}, "sweep.grid", "none is given"),
    ],
)
def test_a_wrong_value_is_refused_where_it_was_given(
    client: TestClient, wanted: dict[str, Any], path: str, said: str
) -> None:
    answer = client.post("/v1/jobs", json={**TRAIN, "sweep": wanted})
    assert answer.status_code == 422, answer.text
    found = {error["path"]: error["message"] for error in answer.json()["errors"]}
    assert path in found, found
    assert said in found[path]
    assert client.get("/v1/jobs").json()["items"] == []


def test_a_sweep_sent_again_under_its_key_is_the_same_sweep(client: TestClient) -> None:
    first, again = (
        client.post("/v1/jobs", json={**TRAIN, "sweep": GRID}, headers={"Idempotency-Key": "once"}) for _ in range(2)
    )
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    assert len(client.get("/v1/jobs").json()["items"]) == 5


def test_a_batch_takes_no_sweep(client: TestClient) -> None:
    answer = client.post("/v1/jobs:batch", json={"jobs": [TRAIN, {**TRAIN, "sweep": GRID}]})
    assert [error["path"] for error in answer.json()["errors"]] == ["jobs.1.sweep"]


def test_only_the_owner_cancels_a_sweep(client: TestClient, keys: Keys) -> None:
    parent = sweep(client)
    refused = client.post(f"/v1/jobs/{parent}/cancel", headers=bearer(keys["submit"]))
    assert refused.status_code == 403


def test_the_jobs_of_sweeps_can_be_left_out_of_lists_and_counts(client: TestClient) -> None:
    alone, parent = submit(client, TRAIN), sweep(client)
    for order in ("newest", "active"):
        listed = client.get("/v1/jobs", params={"sweep": "none", "order": order}).json()["items"]
        assert {job["id"] for job in listed} == {alone, parent}
    for params, expected in (
        ({}, 5),
        ({"sweep": "none"}, 1),
        ({"sweep": "none", "q": "job_"}, 1),
        ({"sweep": parent}, 4),
    ):
        answer = client.get("/v1/jobs:counts", params=params).json()
        assert (answer["states"]["queued"], answer["exact"]) == (expected, True)
    client.post(f"/v1/jobs/{parent}/cancel")
    assert client.delete(f"/v1/jobs/{parent}").status_code == 204
    assert client.get("/v1/jobs:counts").json()["states"] == {**dict.fromkeys(STATES, 0), "queued": 1}


def test_a_list_of_several_states(client: TestClient) -> None:
    over, queued = submit(client, TRAIN), submit(client, TRAIN)
    client.post(f"/v1/jobs/{over}/cancel")
    for states, found in (
        (["queued", "cancelled"], [queued, over]),
        (["cancelled", "failed"], [over]),
        (["failed"], []),
    ):
        answer = client.get("/v1/jobs", params={"state": states})
        assert [job["id"] for job in answer.json()["items"]] == found
    refused = client.get("/v1/jobs", params={"state": ["queued", "asleep"]})
    assert refused.status_code == 422
    assert "asleep" in refused.text


def test_only_jobs_that_might_not_fail_again_are_queued_again(client: TestClient, worker: Worker) -> None:
    parent = sweep(client, {"grid": {"seed": [1, 2]}})
    impossible, unlucky = (each["id"] for each in jobs_of(client, parent))
    worker.fail(worker.start(impossible), "no such layer\nsecond line", final=True)
    worker.fail(worker.start(unlucky))
    assert client.post(f"/v1/jobs/{parent}/retry").json()["state"] == "running"
    assert [job_of(client, each)["state"] for each in (impossible, unlucky)] == ["failed", "queued"]
    worker.fail(worker.start(unlucky), final=True)
    for asked in (impossible, parent):
        refused = client.post(f"/v1/jobs/{asked}/retry")
        assert refused.status_code == 409
        assert refused.json()["detail"].endswith(f"{impossible} would fail again: no such layer")
