"""Keys, jobs and lists by project."""

from __future__ import annotations

from api_world import TRAIN, Keys, bearer, submit
from fastapi.testclient import TestClient


def test_a_job_belongs_to_the_project_of_its_key(client: TestClient, keys: Keys) -> None:
    client.post("/v1/projects", json={"name": "vision"})
    made = client.post("/v1/keys", json={"name": "ann", "scopes": ["submit"], "project": "vision"})
    assert made.status_code == 201
    assert made.json()["project"] == "vision"
    ann = bearer(made.json()["secret"])
    job = client.post("/v1/jobs", json=TRAIN, headers=ann).json()
    assert (job["project"], job["owner"]) == ("vision", "ann")
    ours = submit(client)
    assert client.get(f"/v1/jobs/{ours}").json()["project"] == "default"
    listed = client.get("/v1/jobs", params={"project": "vision"}).json()["items"]
    assert [each["id"] for each in listed] == [job["id"]]


def test_only_an_operator_names_another_project(client: TestClient, keys: Keys) -> None:
    for path in ("/v1/jobs", "/v1/files"):  # whoever made the project later would get what it holds
        assert client.post(path, json=TRAIN, params={"project": "vision"}).status_code == 404
    client.post("/v1/projects", json={"name": "vision"})
    answer = client.post("/v1/jobs", json=TRAIN, params={"project": "vision"})
    assert answer.status_code == 201
    assert answer.json()["project"] == "vision"
    ann = bearer(keys.of("vision", "submit"))
    assert client.post("/v1/jobs", json=TRAIN, params={"project": "vision"}, headers=ann).status_code == 201
    refused = client.post("/v1/jobs", json=TRAIN, params={"project": "default"}, headers=ann)
    assert refused.status_code == 403
    assert "'vision'" in refused.json()["detail"]


def test_an_admin_of_a_project_does_not_run_the_service(client: TestClient, keys: Keys) -> None:
    maintainer = bearer(keys.of("vision", "admin"))
    for method, path in (("GET", "/v1/keys"), ("POST", "/v1/hosts/x/drain"), ("DELETE", "/v1/keys/x")):
        answer = client.request(method, path, headers=maintainer)
        assert answer.status_code == 403
        assert "vision" in answer.json()["detail"]


def test_maintainers_change_jobs_of_their_project_and_submitters_their_own(client: TestClient, keys: Keys) -> None:
    ann, bob = bearer(keys.of("vision", "submit", "ann")), bearer(keys.of("vision", "submit", "bob"))
    job = client.post("/v1/jobs", json=TRAIN, headers=ann).json()["id"]
    refused = client.post(f"/v1/jobs/{job}/cancel", headers=bob)
    assert refused.status_code == 403
    assert "'ann' of project 'vision'" in refused.json()["detail"]
    assert client.post(f"/v1/jobs/{job}/cancel", headers=bearer(keys.of("vision", "admin", "meg"))).status_code == 202
    assert client.post(f"/v1/jobs/{job}/retry", headers=ann).status_code == 202
    assert client.post(f"/v1/jobs/{job}/cancel", headers=bearer(keys["admin"])).status_code == 202
