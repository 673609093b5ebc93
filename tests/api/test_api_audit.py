"""Whatever changes something leaves an entry that says who did it; only admins read the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import orjson
import pytest
from api_world import TRAIN, Keys, Worker, bearer, submit
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from service.jobs.records.audit import verify_chain
from service.jobs.store import Store
from service.jobs.store.audit import REFUSALS_RECORDED

Answer = httpx2.Response


@dataclass(frozen=True)
class World:
    """What a call needs that is to succeed."""

    client: TestClient
    store: Store
    worker: Worker
    keys: Keys

    def ended_job(self) -> str:
        job_id = submit(self.client)
        self.store.jobs.cancel(job_id)
        return job_id

    def host(self) -> str:
        self.worker.beat()
        return self.worker.name

    def project(self, *members: str) -> str:
        made = self.store.projects.create("vision").name
        for member in members:
            self.store.projects.set_member(made, member, "viewer")
        return made

    def account(self) -> str:
        return self.store.accounts.create("ci", ["submit"]).name

    def sign_in(self) -> Answer:
        return self.client.post("/login", data={"key": self.keys["submit"]}, headers={"X-Trivet": "1"})

    def sign_out(self) -> Answer:
        self.sign_in()
        return self.client.post("/logout", headers={"X-Trivet": "1"})


CHANGES: dict[tuple[str, str], tuple[str, Callable[[World], Answer]]] = {
    ("POST", "/v1/jobs"): ("job.submit", lambda world: world.client.post("/v1/jobs", json=TRAIN)),
    ("POST", "/v1/jobs:batch"): (
        "job.submit", lambda world: world.client.post("/v1/jobs:batch", json={"jobs": [TRAIN]}),
    ),
    ("POST", "/v1/jobs/{job_id}/cancel"): (
        "job.cancel", lambda world: world.client.post(f"/v1/jobs/{submit(world.client)}/cancel"),
    ),
    ("POST", "/v1/jobs/{job_id}/retry"): (
        "job.retry", lambda world: world.client.post(f"/v1/jobs/{world.ended_job()}/retry"),
    ),
    ("DELETE", "/v1/jobs/{job_id}"): ("job.delete", lambda world: world.client.delete(f"/v1/jobs/{world.ended_job()}")),
    ("POST", "/v1/jobs:delete"): (
        "job.delete",
        lambda world: world.ended_job() and world.client.post("/v1/jobs:delete", params={"state": "cancelled"}),
    ),
    ("POST", "/v1/files"): ("file.upload", lambda world: world.client.post("/v1/files", content=b"x")),
    ("DELETE", "/v1/files/{file_id}"): (
        "file.delete",
        lambda world: world.client.delete(f"/v1/files/{world.client.post('/v1/files', content=b'x').json()['id']}"),
    ),
    ("POST", "/v1/hosts/{name}/drain"): (
        "host.drain", lambda world: world.client.post(f"/v1/hosts/{world.host()}/drain"),
    ),
    ("POST", "/v1/hosts/{name}/resume"): (
        "host.resume", lambda world: world.client.post(f"/v1/hosts/{world.host()}/resume"),
    ),
    ("PUT", "/v1/shares/{project}"): (
        "project.weigh", lambda world: world.client.put("/v1/shares/default", json={"weight": 2}),
    ),
    ("POST", "/v1/keys"): ("key.create", lambda world: world.client.post("/v1/keys", json={"name": "bob"})),
    ("DELETE", "/v1/keys/{key_id}"): (
        "key.revoke",
        lambda world: world.client.delete(f"/v1/keys/{world.store.keys.create('bob', ['read'])[0].id}"),
    ),
    ("POST", "/v1/webhooks"): (
        "webhook.create",
        lambda world: world.client.post("/v1/webhooks", json={"url": "https://example.org/"}),
    ),
    ("POST", "/v1/webhooks/secret/renew"): (
        "webhook.renew", lambda world: world.client.post("/v1/webhooks/secret/renew"),
    ),
    ("DELETE", "/v1/webhooks/{webhook_id}"): (
        "webhook.delete",
        lambda world: world.client.delete(
            f"/v1/webhooks/{world.store.webhooks.create('https://example.org/', [], [], project=None, by='bob')[0].id}"
        ),
    ),
    ("POST", "/v1/keys/{key_id}/rotate"): (
        "key.rotate",
        lambda world: world.client.post(f"/v1/keys/{world.store.keys.create('bob', ['read'])[0].id}/rotate"),
    ),
    ("POST", "/v1/jobs/{job_id}/share"): (
        "job.share",
        lambda world: world.client.post(f"/v1/jobs/{world.ended_job()}/share", json={"project": world.project()}),
    ),
    ("DELETE", "/v1/jobs/{job_id}/share/{project}"): (
        "job.unshare", lambda world: world.client.delete(f"/v1/jobs/{world.ended_job()}/share/vision"),
    ),
    ("POST", "/v1/projects"): (
        "project.create", lambda world: world.client.post("/v1/projects", json={"name": "vision"}),
    ),
    ("PATCH", "/v1/projects/{name}"): (
        "project.change",
        lambda world: world.client.patch(f"/v1/projects/{world.project()}", json={"description": "cameras"}),
    ),
    ("DELETE", "/v1/projects/{name}"): (
        "project.delete", lambda world: world.client.delete(f"/v1/projects/{world.project()}"),
    ),
    ("PUT", "/v1/projects/{name}/members/{owner}"): (
        "member.set",
        lambda world: world.client.put(f"/v1/projects/{world.project()}/members/ann", json={"role": "viewer"}),
    ),
    ("DELETE", "/v1/projects/{name}/members/{owner}"): (
        "member.remove", lambda world: world.client.delete(f"/v1/projects/{world.project('ann')}/members/ann"),
    ),
    ("POST", "/v1/accounts"): ("account.create", lambda world: world.client.post("/v1/accounts", json={"name": "ci"})),
    ("POST", "/v1/accounts/{name}/keys"): (
        "key.create",
        lambda world: world.client.post(f"/v1/accounts/{world.account()}/keys"),
    ),
    ("POST", "/v1/accounts/{name}/disable"): (
        "account.disable",
        lambda world: world.client.post(f"/v1/accounts/{world.account()}/disable"),
    ),
    ("POST", "/v1/accounts/{name}/enable"): (
        "account.enable",
        lambda world: world.client.post(f"/v1/accounts/{world.account()}/enable"),
    ),
    ("DELETE", "/v1/accounts/{name}"): (
        "account.delete",
        lambda world: world.client.delete(f"/v1/accounts/{world.account()}"),
    ),
    ("POST", "/login"): ("session.begin", World.sign_in),
    ("POST", "/logout"): ("session.end", World.sign_out),
}  # fmt: skip
"""Every call that changes something: the action that it is recorded as, and how it is made to succeed. Whoever adds a
call adds it here, and ``audit(request, …)`` to its function."""
CHANGES_NOTHING = {
    ("POST", "/v1/jobs:check"): "says whether a spec would be accepted, and submits nothing",
    ("POST", "/tickets"): "lets a session read by a link what it may read anyway",
    ("POST", "/login/oidc"): "begins a sign-in, of which nothing follows until it is finished",
}
NEEDS_A_PROVIDER = {("POST", "/login/oidc/callback")}
"""What it leaves is looked at in ``sign_in/test_api_sign_in.py``."""


@pytest.fixture
def world(client: TestClient, store: Store, worker: Worker, keys: Keys) -> World:
    return World(client, store, worker, keys)


def entries(store: Store) -> list[dict[str, Any]]:
    from service.jobs.store import AuditFilter

    return [orjson.loads(line) for line in store.audit.lines(AuditFilter())]


def calls(routed: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every call of a router: its method and its path."""
    for route in routed.routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from calls(inner, prefix + route.include_context.prefix)
        elif isinstance(route, APIRoute):
            yield from ((method, prefix + route.path) for method in route.methods)


def test_every_call_that_changes_something_is_known_here(app: FastAPI) -> None:
    unsafe = {call for call in calls(app) if call[0] not in ("GET", "HEAD", "OPTIONS")}
    assert unsafe == CHANGES.keys() | CHANGES_NOTHING.keys() | NEEDS_A_PROVIDER


@pytest.mark.parametrize("call", CHANGES, ids=" ".join)
def test_a_change_leaves_an_entry_that_says_who_did_it(world: World, call: tuple[str, str]) -> None:
    action, change = CHANGES[call]
    answer = change(world)
    assert answer.status_code < 300, answer.text
    last = entries(world.store)[-1]
    assert last["action"] == action
    actor = "submit" if action.startswith("session") else "admin"
    (key,) = [key for key in world.store.keys.list() if key.name == actor]
    assert (last["actor"], last["key"], last["address"]) == (actor, key.id, "testclient")
    assert bool(last["session"]) == action.startswith("session")
    if call[1].startswith("/v1/jobs"):
        assert last["job"] == job_of(answer)


def job_of(answer: Answer) -> str:
    """The job that a call is about: the last of a batch, the one in the path where the answer is empty."""
    if not answer.content:
        return str(answer.request.url).rpartition("/")[2]
    body = answer.json()
    if "jobs" in body:
        return str(body["jobs"][-1])
    return str(body.get("items", [body])[-1]["id"])


def test_what_a_session_does_is_recorded_with_its_key_and_the_session(world: World) -> None:
    page = world.sign_in().json()["session"]
    del world.client.headers["Authorization"]
    headers = {"X-Trivet-Session": page, "Sec-Fetch-Site": "same-origin"}
    assert world.client.post("/v1/jobs", json=TRAIN, headers=headers).status_code == 201
    begun, submitted = entries(world.store)[-2:]
    assert (submitted["action"], submitted["actor"]) == ("job.submit", "submit")
    assert submitted["session"] == begun["session"] != ""


def test_the_same_submission_again_is_no_change(world: World) -> None:
    for _ in range(2):
        world.client.post("/v1/jobs", json=TRAIN, headers={"Idempotency-Key": "k"})
    assert [entry["action"] for entry in entries(world.store)] == ["job.submit"]


def test_what_was_refused_for_other_reasons_is_no_change(world: World) -> None:
    assert world.client.post("/v1/jobs", json={"kind": "train"}).status_code == 422
    assert world.client.delete("/v1/jobs/job_none").status_code == 404
    assert entries(world.store) == []


def test_refused_sign_ins_and_permissions_are_recorded(world: World) -> None:
    client, keys = world.client, world.keys
    assert client.post("/login", data={"key": "tvt_a_b"}, headers={"X-Trivet": "1"}).status_code == 401
    assert client.get("/v1/jobs", headers=bearer("tvt_a_b")).status_code == 401
    assert client.get("/v1/keys", headers=bearer(keys["read"])).status_code == 403
    foreign = submit(client)
    assert client.post(f"/v1/jobs/{foreign}/cancel", headers=bearer(keys["submit"])).status_code == 403
    found = [entry for entry in entries(world.store) if entry["action"] != "job.submit"]
    assert [(entry["action"], entry["actor"]) for entry in found] == [
        ("sign_in.refuse", ""),
        ("key.refuse", ""),
        ("permission.refuse", "read"),
        ("permission.refuse", "submit"),
    ]
    assert found[1]["detail"] == {"method": "GET", "path": "/v1/jobs"}
    assert "belongs to 'admin'" in found[3]["detail"]["reason"]
    assert "tvt_a_b" not in str(found)


def test_a_flood_of_wrong_keys_is_recorded_up_to_a_limit(anonymous: TestClient, store: Store) -> None:
    for _ in range(REFUSALS_RECORDED["address"] + 5):
        assert anonymous.get("/v1/jobs", headers=bearer("tvt_a_b")).status_code == 401
    assert len(entries(store)) == REFUSALS_RECORDED["address"]


def test_requests_without_a_key_are_not_recorded(anonymous: TestClient, store: Store) -> None:
    assert anonymous.get("/v1/jobs").status_code == 401
    assert entries(store) == []


def test_admins_read_pages_and_export_lines(world: World) -> None:
    jobs = [submit(world.client) for _ in range(3)]
    world.client.post(f"/v1/jobs/{jobs[1]}/cancel")
    first = world.client.get("/v1/audit", params={"limit": 2}).json()
    assert [entry["action"] for entry in first["items"]] == ["job.cancel", "job.submit"]
    second = world.client.get("/v1/audit", params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert [entry["job"] for entry in second["items"]] == [jobs[1], jobs[0]]
    of_job = world.client.get("/v1/audit", params={"job": jobs[1]}).json()["items"]
    assert [entry["action"] for entry in of_job] == ["job.cancel", "job.submit"]
    assert (
        world.client.get("/v1/audit", params={"action": "job.cancel", "actor": "admin"}).json()["items"] == of_job[:1]
    )
    assert world.client.get("/v1/audit", params={"since": "2999-01-01T00:00:00"}).json()["items"] == []
    exported = world.client.get("/v1/audit", params={"format": "jsonl"})
    assert exported.headers["content-type"] == "application/x-ndjson"
    whole = verify_chain(exported.text.splitlines(), [world.store.audit.head()])
    assert (whole.entries, whole.head.model_dump()) == (4, first["head"])


@pytest.mark.parametrize(
    ("params", "path"),
    [
        ({"action": "job.burn"}, "action"), ({"since": "yesterday"}, "since"), ({"cursor": "x"}, "cursor"),
        ({"cursor": "²"}, "cursor"), ({"cursor": "9" * 30}, "cursor"), ({"limit": "0"}, "limit"),
    ],
)  # fmt: skip
def test_odd_questions_are_refused(client: TestClient, params: dict[str, str], path: str) -> None:
    answer = client.get("/v1/audit", params=params)
    assert answer.status_code == 422
    assert [error["path"] for error in answer.json()["errors"]] == [path]
