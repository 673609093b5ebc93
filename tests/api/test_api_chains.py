"""Chains over REST: one spec of jobs that name each other, accepted as a whole or refused by the names in it."""

from __future__ import annotations

from typing import Any

import pytest
from api_world import COMPILE, TRAIN, VERIFY, Worker, job_of, submit
from fastapi.testclient import TestClient

JOBS: dict[str, dict[str, Any]] = {
    "gated": {**TRAIN, "compile": {"train": True, "gate": "check"}, "after": ["verify"]},
    "verify": {**VERIFY, "model": {"job": "train"}, "name": "how robust"},
    "check": {**COMPILE, "model": {"job": "train"}},
    "train": TRAIN,
}


def chain(jobs: Any = None, **fields: Any) -> dict[str, Any]:
    return {"kind": "chain", "name": "digits", "jobs": JOBS if jobs is None else jobs, **fields}


def jobs_of(client: TestClient, parent: str) -> dict[str, dict[str, Any]]:
    """The jobs of a chain by name, in the order in which they were accepted."""
    page = client.get("/v1/jobs", params={"sweep": parent, "include": "spec"}).json()
    return {job["parameters"]["job"]: job for job in reversed(page["items"])}


def test_a_chain_is_a_parent_and_its_jobs_name_each_other(client: TestClient) -> None:
    parent = job_of(client, submit(client, chain(labels={"team": "a"})))
    assert (parent["state"], parent["kind"], parent["progress"]["total"]) == ("running", "chain", 4)
    assert parent["spec"]["jobs"]["verify"]["model"] == {"job": "train"}
    jobs = jobs_of(client, parent["id"])
    assert next(iter(jobs)) == "train"
    assert list(jobs)[-1] == "gated"
    ids = {name: job["id"] for name, job in jobs.items()}
    assert jobs["verify"]["spec"]["model"]["job"] == ids["train"]
    assert jobs["gated"]["spec"]["compile"]["gate"] == ids["check"]
    assert jobs["gated"]["spec"]["after"] == [ids["verify"]]
    assert {name: job["name"] for name, job in jobs.items()} == {
        "train": "digits: train",
        "verify": "how robust",
        "check": "digits: check",
        "gated": "digits: gated",
    }
    assert jobs["verify"]["reason"] == f"waits for {ids['train']}"
    users = client.get("/v1/jobs", params={"needs": ids["train"]}).json()["items"]
    assert {job["id"] for job in users} == {ids["verify"], ids["check"]}
    assert "zzzzzzzzz" not in client.get("/v1/jobs", params={"include": "spec"}).text


def test_a_chain_runs_in_order_and_has_the_results_by_name(client: TestClient, worker: Worker) -> None:
    parent = submit(client, chain())
    jobs = jobs_of(client, parent)
    for number, name in enumerate(jobs):
        assert job_of(client, parent)["state"] == "running"
        worker.succeed(
            worker.start(jobs[name]["id"]), {"loss": number / 3, "long": ["x" * 20_000] if name == "check" else []}
        )
    over = job_of(client, parent)
    assert (over["state"], over["progress"]["done"]) == ("succeeded", 4)
    order = list(jobs)
    assert over["result"] == {
        **{name: {"loss": order.index(name) / 3, "long": []} for name in order},
        "check": {"job": jobs["check"]["id"]},
    }
    assert client.delete(f"/v1/jobs/{parent}").status_code == 204
    assert client.get("/v1/jobs").json()["items"] == []


def test_a_chain_whose_link_breaks_fails_and_is_retried_as_a_whole(client: TestClient, worker: Worker) -> None:
    parent = submit(client, chain())
    jobs = jobs_of(client, parent)
    worker.succeed(worker.start(jobs["train"]["id"]))
    worker.succeed(worker.start(jobs["check"]["id"]))
    worker.fail(worker.start(jobs["verify"]["id"]))
    over = job_of(client, parent)
    assert (over["state"], over["error"]["message"]) == ("failed", "2 of its 4 jobs failed")
    assert job_of(client, jobs["gated"]["id"])["error"]["type"] == "DependencyFailed"
    assert client.post(f"/v1/jobs/{parent}/retry").json()["state"] == "running"
    assert job_of(client, jobs["gated"]["id"])["reason"] == f"waits for {jobs['verify']['id']}"
    for name in ("verify", "gated"):
        worker.succeed(worker.start(jobs[name]["id"]))
    assert job_of(client, parent)["state"] == "succeeded"


def test_a_cancel_ends_all_jobs_of_a_chain(client: TestClient, worker: Worker) -> None:
    parent = submit(client, chain())
    jobs = jobs_of(client, parent)
    worker.succeed(worker.start(jobs["train"]["id"]))
    assert client.post(f"/v1/jobs/{parent}/cancel").json()["state"] == "cancelled"
    states = {name: job["state"] for name, job in jobs_of(client, parent).items()}
    assert states == {"train": "succeeded", "verify": "cancelled", "check": "cancelled", "gated": "cancelled"}


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        (
            {"train": TRAIN, "verify": {**VERIFY, "model": {"job": "trains"}}},
            ("jobs.verify.model.job", "trains", "one of train, verify, or job_"),
        ),
        ({"a": {**TRAIN, "after": ["b"]}, "b": {**TRAIN, "after": ["a"]}}, ("jobs.a.after.0", "b", "no circle")),
        ({"a": {**TRAIN, "after": ["a"]}}, ("jobs.a.after.0", "a", "no circle")),
        ({"a": {**TRAIN, "stepps": 3}}, ("jobs.a.stepps", 3, "one of ")),
        ({"a": {**TRAIN, "sweep": {"grid": {"seed": [1]}}}}, ("jobs.a.sweep", "a", "one job")),
        ({"a": {"kind": "chain", "jobs": {"b": TRAIN}}}, ("jobs.a.kind", "a", "one job")),
        ({"a": COMPILE, "b": {**VERIFY, "model": {"job": "a"}}}, ("jobs.b.model.job", "a", "a train job")),
        ({"a": {**TRAIN, "parallel": {"tp": 7}}}, ("jobs.a.model.hidden.0", 16, "a multiple of 7")),
        ({"a": TRAIN, "b": {**TRAIN, "resume": {"job": "a"}}}, ("jobs.b.steps", 10, "more than 10")),
        ({"A b": TRAIN}, ("jobs.A b", "A b", "a string that matches")),
        ({}, ("jobs", {}, "at least 1")),
    ],
)
def test_a_chain_is_refused_as_a_whole_with_the_names_in_it(
    client: TestClient, jobs: dict[str, Any], expected: tuple[str, Any, str]
) -> None:
    answer = client.post("/v1/jobs", json=chain(jobs))
    assert answer.status_code == 422, answer.text
    found = {error["path"]: (error["got"], error["expected"]) for error in answer.json()["errors"]}
    path, got, accepted = expected
    assert path in found, found
    assert found[path][0] == got
    assert accepted in found[path][1]
    assert "zzzzzzzzz" not in answer.text
    assert client.get("/v1/jobs").json()["items"] == []


def test_what_a_chain_does_not_use_is_refused(client: TestClient) -> None:
    for changes, path in (({"parallel": {"tp": 2}}, "parallel"), ({"after": ["job_" + "a" * 20]}, "after")):
        answer = client.post("/v1/jobs", json=chain(**changes))
        assert [error["path"] for error in answer.json()["errors"]] == [path]
    answer = client.post("/v1/jobs:batch", json={"jobs": [chain()]})
    assert [error["path"] for error in answer.json()["errors"]] == ["jobs.0.kind"]
    draft = client.post("/v1/jobs:check", json={"text": "kind: chain\njobs: {a: {kind: train}}"}).json()
    assert {error["path"] for error in draft["errors"]} == {"jobs.a.model", "jobs.a.data", "jobs.a.steps"}


def test_a_chain_sent_again_under_its_key_is_the_same_chain(client: TestClient) -> None:
    first, again = (client.post("/v1/jobs", json=chain(), headers={"Idempotency-Key": "once"}) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    assert len(client.get("/v1/jobs").json()["items"]) == 5
