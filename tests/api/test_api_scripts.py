"""Scripts of one's own: only where the operator allows them, and only archives that a rank could take."""

from __future__ import annotations

from api_world import Keys, bearer
from archives import zipped
from fastapi.testclient import TestClient

TRAIN = "train.py"


def test_a_project_runs_scripts_only_while_its_operator_allows_it(client: TestClient, keys: Keys) -> None:
    ann, meg = bearer(keys.of("vision", "submit", "ann")), bearer(keys.of("vision", "admin", "meg"))
    stored = client.post("/v1/files", content=zipped({TRAIN: b"print(1)"}), headers=ann).json()["id"]
    spec = {"kind": "script", "archive": stored, "entry": TRAIN}
    refused = client.post("/v1/jobs", json=spec, headers=ann)
    assert refused.status_code == 422
    (error,) = refused.json()["errors"]
    assert error["path"] == "kind"
    assert error["message"] == "project 'vision' may not run scripts: it lacks scripts: true"
    swept = client.post("/v1/jobs", json={**spec, "sweep": {"grid": {"ranks": [1, 2]}}}, headers=ann)
    assert swept.status_code == 422
    assert client.patch("/v1/projects/vision", json={"scripts": True}, headers=meg).status_code == 403
    assert client.patch("/v1/projects/vision", json={"scripts": True}).json()["scripts"] is True
    swept = client.post("/v1/jobs", json={**spec, "sweep": {"grid": {"ranks": [1, 2]}}}, headers=ann)
    assert swept.status_code == 201, swept.text
    job = client.post("/v1/jobs", json=spec, headers=ann)
    assert job.status_code == 201, job.text
    here = f"/v1/jobs/{job.json()['id']}"
    client.post(f"{here}/cancel", headers=ann)
    assert client.patch("/v1/projects/vision", json={"scripts": False}).json()["scripts"] is False
    again = client.post(f"{here}/retry", headers=ann)
    assert again.status_code == 409
    assert "project 'vision' lacks scripts: true" in again.json()["detail"]


def test_a_pattern_that_no_file_can_match_is_refused_before_the_script_has_run_in_vain(client: TestClient) -> None:
    client.patch("/v1/projects/default", json={"scripts": True})
    stored = client.post("/v1/files", content=zipped({TRAIN: b""})).json()["id"]
    spec = {"kind": "script", "archive": stored, "entry": TRAIN, "keep": [".", "out/**.pt", "out/**", "**/*.pt"]}
    refused = client.post("/v1/jobs", json=spec)
    assert [error["path"] for error in refused.json()["errors"]] == ["keep.0", "keep.1"]


def test_an_archive_without_the_entry_is_refused_at_submit(client: TestClient) -> None:
    client.patch("/v1/projects/default", json={"scripts": True})
    stored = client.post("/v1/files", content=zipped({"other.py": b""})).json()["id"]
    refused = client.post("/v1/jobs", json={"kind": "script", "archive": stored, "entry": TRAIN})
    assert refused.status_code == 422
    (error,) = refused.json()["errors"]
    assert (error["path"], error["message"]) == (
        "archive", "the archive has no train.py; its Python files are other.py",
    )  # fmt: skip
    assert client.get("/v1/jobs").json()["items"] == []
