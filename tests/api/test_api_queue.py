"""The queue through the API: lines in order, filtered and paged."""

from __future__ import annotations

from api_world import TRAIN, Keys, Worker, bearer, submit
from fastapi.testclient import TestClient

from service.jobs.store import Store


def test_each_waiting_job_has_a_line(client: TestClient, worker: Worker) -> None:
    first, second = submit(client, TRAIN), submit(client, TRAIN | {"priority": 3, "parallel": {"dp_shard": 4}})
    dependent = submit(client, TRAIN | {"after": [first]})
    page = client.get("/v1/queue").json()
    assert [(line["job"], line["place"]) for line in page["items"]] == [(second, 1), (first, 2), (dependent, None)]
    assert (page["pending"], page["dependent"], page["next_cursor"]) == (2, 1, None)
    assert page["items"][2]["reason"] == f"waits for {first}"
    worker.start(second)
    (line,) = client.get("/v1/queue", params={"job": first}).json()["items"]
    assert line | {"start": None} == line
    assert (line["place"], line["reason"]) == (1, "waits for 1 free cpu device")


def test_pages_follow_each_other(client: TestClient) -> None:
    jobs = [submit(client, TRAIN | {"seed": seed}) for seed in range(3)]
    first = client.get("/v1/queue", params={"limit": 2}).json()
    rest = client.get("/v1/queue", params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert [line["job"] for page in (first, rest) for line in page["items"]] == jobs
    assert rest["next_cursor"] is None
    refused = client.get("/v1/queue", params={"cursor": "job_x"})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["path"] == "cursor"


def test_own_jobs_keep_their_places_among_others(client: TestClient, anonymous: TestClient, keys: Keys) -> None:
    for seed in range(3):
        submit(client, TRAIN | {"seed": seed})
    headers = bearer(keys.named("bob", "submit"))
    mine = anonymous.post("/v1/jobs", json=TRAIN, headers=headers).json()["id"]
    answer = anonymous.get("/v1/queue", params={"owner": "bob"}, headers=headers).json()
    assert [(line["job"], line["place"]) for line in answer["items"]] == [(mine, 4)]


def test_shares_are_listed_and_weighed(client: TestClient, worker: Worker) -> None:
    worker.start(submit(client, TRAIN))
    assert client.put("/v1/shares/vision", json={"weight": 2}).status_code == 404
    client.post("/v1/projects", json={"name": "vision"})
    answer = client.put("/v1/shares/vision", json={"weight": 2})
    assert (answer.status_code, answer.json()["weight"]) == (200, 2)
    shares = {share["project"]: share for share in client.get("/v1/shares").json()["items"]}
    assert shares["default"]["devices"] == 1
    assert shares["vision"] == {"project": "vision", "weight": 2, "used_s": 0, "devices": 0, "share": 0}
    refused = client.put("/v1/shares/vision", json={"weight": 0})
    assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, "weight")


def test_only_an_admin_weighs_projects(anonymous: TestClient, keys: Keys) -> None:
    answer = anonymous.put("/v1/shares/vision", json={"weight": 2}, headers=bearer(keys["submit"]))
    assert answer.status_code == 403


def test_a_key_sees_the_places_of_its_own_project_among_all(
    client: TestClient, anonymous: TestClient, keys: Keys, store: Store
) -> None:
    submit(client, TRAIN)
    client.post("/v1/projects", json={"name": "vision"})
    secret = store.keys.create("bob", ["submit"], "vision")[1]
    mine = anonymous.post("/v1/jobs", json=TRAIN, headers=bearer(secret)).json()["id"]
    answer = anonymous.get("/v1/queue", headers=bearer(secret)).json()
    assert [(line["job"], line["project"], line["place"]) for line in answer["items"]] == [(mine, "vision", 2)]
    assert answer["pending"] == 2
