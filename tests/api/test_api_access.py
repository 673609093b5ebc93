"""Nothing of a project is told to a key of another: every route by which a job can be asked for, as such a key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from api_world import COMPILE, TRAIN, VERIFY, Keys, Server, Worker, bearer, listening, submit
from fastapi import FastAPI
from fastapi.testclient import TestClient
from waiting import eventually

from service.jobs.store import Store

BODIES: dict[tuple[str, str], Any] = {("post", "/v1/jobs/{job_id}/share"): {"project": "default"}}
STREAMS = {"/v1/jobs/{job_id}/events", "/v1/jobs/{job_id}/logs"}


def of_a_job(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Every call whose path has a job's id."""
    for path, operations in app.openapi()["paths"].items():
        if "{job_id}" in path:
            yield from ((method, path) for method in operations)


def filled(path: str, job_id: str) -> str:
    return re.sub(r"\{\w+\}", "x", path.replace("{job_id}", job_id))


def without_names(text: str, job_id: str) -> str:
    """An answer without the job's id and the request's own."""
    return re.sub(r'"request_id":"\w+"', "", text.replace(job_id, "JOB"))


@pytest.fixture
def theirs(client: TestClient, keys: Keys, worker: Worker) -> str:
    """A job of another project, which runs and has produced something."""
    secret = keys.of("vision", "submit", "vera")
    job_id = str(client.post("/v1/jobs", json={**TRAIN, "name": "secret"}, headers=bearer(secret)).json()["id"])
    ref = worker.start(job_id)
    worker.metrics(ref, [1.0])
    return job_id


@pytest.mark.parametrize("scope", ["read", "submit", "admin"])
def test_every_call_about_a_job_of_another_project_finds_nothing(
    client: TestClient, app: FastAPI, keys: Keys, theirs: str, scope: Any
) -> None:
    """The answer is that for a job which does not exist, word for word."""
    stranger = bearer(keys.of("language", scope, "vera"))
    calls = list(of_a_job(app))
    assert len(calls) >= 15
    missing = "job_" + "0" * 20
    for method, path in calls:
        for accept in ("application/json", "text/event-stream") if path in STREAMS else ("application/json",):
            answers = []
            for job_id in (theirs, missing):
                headers = {**stranger, "Accept": accept}
                body = BODIES.get((method, path))
                answer = client.request(method.upper(), filled(path, job_id), headers=headers, json=body)
                answers.append((answer.status_code, without_names(answer.text, job_id)))
            assert answers[0] == answers[1], (method, path, accept)
            assert answers[0][0] in {403, 404} if scope == "read" else answers[0][0] == 404, (method, path)
    assert client.get(f"/v1/jobs/{theirs}").json()["state"] == "running"


def test_lists_and_hosts_tell_nothing_of_other_projects(client: TestClient, keys: Keys, theirs: str) -> None:
    stranger = bearer(keys.of("language", "admin", "vera"))
    for path in ("/v1/jobs", "/v1/jobs?project=vision", "/v1/jobs?q=secret&include=spec", "/v1/jobs?owner=vera"):
        assert client.get(path, headers=stranger).json() == {"items": [], "next_cursor": None}
    for path in ("/v1/jobs:counts", "/v1/jobs:counts?project=vision", "/v1/jobs:counts?q=secret"):
        assert set(client.get(path, headers=stranger).json()["states"].values()) == {0}
    queued = client.post("/v1/jobs", json=TRAIN, headers=bearer(keys.of("vision", "submit", "vera"))).json()["id"]
    assert client.get("/v1/jobs?order=active", headers=stranger).json() == {"items": [], "next_cursor": None}
    assert client.get("/v1/queue", headers=stranger).json()["items"] == []
    (line,) = client.get("/v1/queue", headers=bearer(keys.of("vision", "read", "vic"))).json()["items"]
    assert line["job"] == queued
    (host,) = client.get("/v1/hosts", headers=stranger).json()["items"]
    assert host["running"] == []
    assert host["held"] == [{"job": None, "attempt": 0, "pool": "cpu", "devices": [0], "lost": False}]
    assert len(host["free"]["cpu"]) == 3
    assert client.get("/v1/events", params={"jobs": theirs}, headers=stranger).status_code == 404
    assert client.get("/v1/projects/vision", headers=stranger).status_code == 404
    assert [each["name"] for each in client.get("/v1/projects", headers=stranger).json()["items"]] == ["language"]
    (seen,) = client.get("/v1/hosts", headers=bearer(keys.of("vision", "read", "vic"))).json()["items"]
    assert seen["running"] == [theirs]


def test_specs_name_only_jobs_that_their_project_sees(client: TestClient, keys: Keys, theirs: str) -> None:
    stranger = bearer(keys.of("language", "submit", "vera"))
    checked = submit(client, COMPILE, name="gate")
    named: list[tuple[dict[str, Any], str]] = [
        ({**TRAIN, "after": [theirs]}, "after.0"),
        ({**TRAIN, "model": {"job": theirs}}, "model.job"),
        ({**VERIFY, "model": {"job": theirs}}, "model.job"),
        ({**TRAIN, "compile": {"train": True, "gate": checked}}, "compile.gate"),
    ]
    for spec, path in named:
        answer = client.post("/v1/jobs", json=spec, headers=stranger)
        assert answer.status_code == 422, spec
        assert f"{path}: there is no job" in answer.json()["detail"]
    assert client.post("/v1/jobs", json=named[0][0], params={"project": "language"}).status_code == 422
    client.post(f"/v1/jobs/{theirs}/share", json={"project": "language"})
    for spec, _ in named[:3]:
        assert client.post("/v1/jobs", json=spec, headers=stranger).status_code == 201


def test_a_shared_job_can_be_read_and_no_more(client: TestClient, app: FastAPI, keys: Keys, theirs: str) -> None:
    vera, friend = (bearer(keys.of(project, "submit", "vera")) for project in ("vision", "language"))
    keys.of("speech", "read", "sam")
    for project in ("language", "speech"):
        shared = client.post(f"/v1/jobs/{theirs}/share", json={"project": project}, headers=vera)
        assert shared.status_code == 200
    assert shared.json()["shared_with"] == ["language", "speech"]
    assert client.get(f"/v1/jobs/{theirs}", headers=friend).json()["shared_with"] == ["language"]
    assert [each["id"] for each in client.get("/v1/jobs", headers=friend).json()["items"]] == [theirs]
    assert client.get(f"/v1/jobs/{theirs}/metrics", headers=friend).json()["series"]["loss"]["value"] == [1.0]
    for method, path in of_a_job(app):
        if method != "get":
            body = BODIES.get((method, path))
            answer = client.request(method.upper(), filled(path, theirs), headers=friend, json=body)
            assert answer.status_code == 403, (method, path)
    assert client.delete(f"/v1/jobs/{theirs}/share/language", headers=vera).json()["shared_with"] == ["speech"]
    assert client.get(f"/v1/jobs/{theirs}", headers=friend).status_code == 404
    assert client.get("/v1/jobs", headers=friend).json()["items"] == []


def test_what_cannot_be_shared_is_told(client: TestClient, keys: Keys, theirs: str) -> None:
    assert client.post(f"/v1/jobs/{theirs}/share", json={"project": "nobody"}).status_code == 404
    own = client.post(f"/v1/jobs/{theirs}/share", json={"project": "vision"})
    assert own.status_code == 409
    assert "belongs to project vision" in own.json()["detail"]


def test_a_job_that_others_need_does_not_name_them(client: TestClient, keys: Keys, worker: Worker) -> None:
    vera, friend = (bearer(keys.of(project, "submit", "vera")) for project in ("vision", "language"))
    job_id = client.post("/v1/jobs", json=TRAIN, headers=vera).json()["id"]
    client.post(f"/v1/jobs/{job_id}/share", json={"project": "language"}, headers=vera)
    user = client.post("/v1/jobs", json={**TRAIN, "after": [job_id]}, headers=friend).json()["id"]
    worker.succeed(worker.start(job_id))
    refused = client.delete(f"/v1/jobs/{job_id}", headers=vera)
    assert refused.status_code == 409
    assert "1 jobs of other projects" in refused.json()["detail"]
    assert user not in refused.text


def test_members_roles_bound_what_their_keys_do(client: TestClient, keys: Keys) -> None:
    ann = bearer(keys.of("vision", "admin", "ann"))
    assert client.put("/v1/projects/vision/members/ann", json={"role": "viewer"}).status_code == 200
    assert client.post("/v1/jobs", json=TRAIN, headers=ann).status_code == 403
    assert client.get("/v1/jobs", headers=ann).status_code == 200
    refused = client.post("/v1/keys", json={"name": "ann", "scopes": ["submit"], "project": "vision"})
    assert refused.status_code == 409
    assert "ann is a viewer" in refused.json()["detail"]
    assert client.delete("/v1/projects/vision/members/ann").status_code == 204
    assert client.get("/v1/jobs", headers=ann).status_code == 401
    assert client.delete("/v1/projects/vision/members/ann").status_code == 404


def test_maintainers_choose_the_members(client: TestClient, keys: Keys) -> None:
    meg, sue = bearer(keys.of("vision", "admin", "meg")), bearer(keys.of("vision", "submit", "sue"))
    refused = client.put("/v1/projects/vision/members/bob", json={"role": "viewer"}, headers=sue)
    assert refused.status_code == 403
    added = client.put("/v1/projects/vision/members/bob", json={"role": "viewer"}, headers=meg)
    roles = [(member["name"], member["role"]) for member in added.json()["members"]]
    assert roles == [("bob", "viewer"), ("meg", "maintainer"), ("sue", "submitter")]
    assert client.put("/v1/projects/language/members/bob", json={"role": "viewer"}, headers=meg).status_code == 404
    for path, body in (("/v1/projects", {"name": "mine"}), ("/v1/projects/vision", {"description": "x"})):
        method = "POST" if path == "/v1/projects" else "PATCH"
        assert client.request(method, path, json=body, headers=meg).status_code == 403
    everybody = client.put("/v1/projects/default/members/bob", json={"role": "viewer"})
    assert everybody.status_code == 409


def test_projects_are_made_changed_and_deleted(client: TestClient, keys: Keys) -> None:
    assert client.post("/v1/projects", json={"name": "vision", "description": "cameras"}).status_code == 201
    assert client.post("/v1/projects", json={"name": "vision"}).status_code == 409
    assert client.post("/v1/projects", json={"name": "default"}).status_code == 409
    assert client.post("/v1/projects", json={"name": "A B"}).status_code == 422
    changed = client.patch("/v1/projects/vision", json={"description": "lidar"}).json()
    assert (changed["name"], changed["description"]) == ("vision", "lidar")
    wrong = {"scripts": True, "quotas": {"longest_time_s": 1, "default_time_s": 2}}
    assert client.patch("/v1/projects/vision", json=wrong).status_code == 422
    assert client.get("/v1/projects/vision").json()["scripts"] is False
    assert [each["name"] for each in client.get("/v1/projects").json()["items"]] == ["default", "vision"]
    unknown = client.post("/v1/keys", json={"name": "ann", "project": "nobody"})
    assert unknown.status_code == 404
    ours = submit(client)
    client.post(f"/v1/jobs/{ours}/share", json={"project": "vision"})
    secret = keys.of("vision", "submit")
    job = client.post("/v1/jobs", json=TRAIN, headers=bearer(secret)).json()["id"]
    hook = client.post("/v1/webhooks", json={"url": "https://example.org/", "project": "vision"}).json()["id"]
    assert client.post("/v1/webhooks", json={"url": "https://example.org/", "project": "no"}).status_code == 404
    client.post("/v1/accounts", json={"name": "ci", "project": "vision"})
    held = client.delete("/v1/projects/vision")
    assert held.status_code == 409
    assert "1 jobs, 0 uploads, 1 keys, 1 accounts and 1 webhooks" in held.json()["detail"]
    client.delete(f"/v1/webhooks/{hook}")
    client.delete("/v1/accounts/ci")
    client.post(f"/v1/jobs/{job}/cancel")
    client.delete(f"/v1/jobs/{job}")
    (key,) = (each["id"] for each in client.get("/v1/keys").json()["items"] if each["project"] == "vision")
    client.delete(f"/v1/keys/{key}")
    assert client.delete("/v1/projects/vision").status_code == 204
    assert client.get("/v1/projects/vision").status_code == 404
    assert client.get(f"/v1/jobs/{ours}").json()["shared_with"] == []
    assert client.delete("/v1/projects/default").status_code == 409


@pytest.mark.slow
def test_streams_end_with_the_membership_and_with_the_sharing(server: Server, store: Store, keys: Keys) -> None:
    vera, friend = keys.of("vision", "submit", "vera"), keys.of("language", "read", "fred")
    url = f"{server.url}/v1/jobs"
    job_id = httpx2.post(url, json=TRAIN, headers=bearer(vera), timeout=300).json()["id"]
    store.jobs.share(job_id, "language")
    with (
        listening(f"{url}/{job_id}/events", vera) as own,
        listening(f"{server.url}/v1/events", vera) as all_own,
        listening(f"{url}/{job_id}/events", friend) as shared,
    ):
        assert next(own).event == next(shared).event == "state"
        store.jobs.stop_sharing(job_id, "language")
        assert [event.event for event in shared][-1] == "bye"
        assert server.app.state.context.hub.open_streams >= 2
        store.projects.remove_member("vision", "vera")
        assert [event.event for event in own][-1] == "bye"
        assert [event.event for event in all_own][-1] == "bye"
    eventually(lambda: server.app.state.context.hub.open_streams == 0)


@pytest.mark.slow
def test_a_stream_over_all_jobs_has_those_that_the_project_sees(server: Server, store: Store, keys: Keys) -> None:
    vera, friend = keys.of("vision", "submit", "vera"), keys.of("language", "submit", "fred")
    url = f"{server.url}/v1/jobs"
    with listening(f"{server.url}/v1/events", friend) as events:
        for _ in range(3):
            httpx2.post(url, json=TRAIN, headers=bearer(vera), timeout=300)
        job_id = httpx2.post(url, json=TRAIN, headers=bearer(friend), timeout=300).json()["id"]
        assert next(events).json()["job"] == job_id
