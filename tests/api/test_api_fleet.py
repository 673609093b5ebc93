"""Files, hosts, kinds, keys, health and numbers."""

from __future__ import annotations

import errno
import hashlib
import os
from typing import Any

import pytest
from api_world import TRAIN, Worker, submit
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from service.jobs.host import ISOLATION_PARTS
from service.jobs.kinds.registry import KINDS
from service.jobs.records import Overcommitment
from service.jobs.settings import Settings
from service.jobs.store import FileWriter, HostReport, Store


def test_an_uploaded_file_is_addressed_by_its_content(client: TestClient) -> None:
    content = b"\x00onnx" * 1000
    digest = hashlib.sha256(content).hexdigest()
    raw = client.post("/v1/files", content=content, headers={"Content-Type": "application/onnx"})
    assert raw.status_code == 201
    told = {name: raw.json()[name] for name in ("id", "sha256", "bytes", "media_type", "project", "owner")}
    assert told == {
        "id": f"file_{digest}", "sha256": digest, "bytes": 5000, "media_type": "application/onnx",
        "project": "default", "owner": "admin",
    }  # fmt: skip
    form = client.post("/v1/files", files={"file": ("m.onnx", content)})
    chunked = client.post("/v1/files", content=iter([content[:3], content[3:]]))
    assert form.json() == chunked.json() == raw.json()
    fetched = client.get(raw.headers["location"])
    assert fetched.content == content
    assert fetched.headers["etag"] == f'"{digest}"'
    assert client.get(raw.headers["location"], headers={"Range": "bytes=1-4"}).content == b"onnx"


@pytest.mark.parametrize("chunked", [True, False])
def test_a_file_beyond_the_limit_leaves_nothing(client: TestClient, settings: Settings, *, chunked: bool) -> None:
    content = b"x" * (settings.max_file_bytes + 1)
    before = sorted(path for path in settings.layout.files.rglob("*") if path.is_file())
    answer = client.post("/v1/files", content=iter([content]) if chunked else content)
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"
    form = client.post("/v1/files", files={"file": ("x", content)})
    assert form.status_code == 413
    for refused in (answer, form):
        assert refused.json()["detail"] == (
            f"the upload is larger than {settings.max_file_bytes} bytes, "
            "the limit of this service (TRIVET_MAX_FILE_BYTES)"
        )
    assert sorted(path for path in settings.layout.files.rglob("*") if path.is_file()) == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_and_leaves_nothing(
    client: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def write(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FileWriter, "write", write)
    before = sorted(settings.layout.files.rglob("*"))
    answer = client.post("/v1/files", content=b"more than there is room for")
    assert answer.status_code == 507
    assert answer.headers["content-type"] == "application/problem+json"
    assert "disk is full" in answer.json()["detail"]
    assert sorted(settings.layout.files.rglob("*")) == before


def test_a_file_as_large_as_the_limit_is_taken_raw_and_in_a_form(client: TestClient, settings: Settings) -> None:
    content = b"y" * settings.max_file_bytes
    assert client.post("/v1/files", content=content).status_code == 201
    assert client.post("/v1/files", files={"file": ("y", content)}).status_code == 201


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_that_is_refused_unread_is_told_the_limit(
    client: TestClient, settings: Settings, *, chunked: bool
) -> None:
    limits = (("/v1/files", "MAX_FILE_BYTES"), ("/v1/jobs", "MAX_BODY_BYTES"))
    for path, name in limits:
        limit = getattr(settings, name.lower())
        content = b" " * (limit + (1 << 20))
        answer = client.post(path, content=iter([content]) if chunked else content)
        assert answer.status_code == 413
        assert answer.json()["detail"] == (
            f"the body is larger than {limit} bytes, the limit of this address (TRIVET_{name})"
        )


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"content": b""}, 422),
        ({"files": {"file": ("x", b"")}}, 422),
        ({"files": {"other": ("x", b"1")}}, 422),
        ({"data": {"file": "text"}}, 415),
        ({"content": b"nonsense", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, 400),
        ({"content": b"nonsense", "headers": {"Content-Type": "multipart/form-data"}}, 400),
    ],
)
def test_a_bad_upload_is_refused(client: TestClient, request_: dict[str, Any], status: int) -> None:
    answer = client.post("/v1/files", **request_)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("file_id", ["file_" + "0" * 64, "x", "..", "file_%2e%2e"])
def test_a_file_that_is_not_there_is_not_found(client: TestClient, file_id: str) -> None:
    assert client.get(f"/v1/files/{file_id}").status_code == 404


def test_hosts_show_devices_and_what_runs_on_them(client: TestClient, worker: Worker) -> None:
    job_id = submit(client, parallel={"tp": 2})
    worker.start(job_id)
    (host,) = client.get("/v1/hosts").json()["items"]
    assert (host["name"], host["alive"], host["draining"], host["cpu_slots"]) == ("fake", True, False, 4)
    assert host["running"] == [job_id]
    assert len(host["free"]["cpu"]) == 2
    placement = client.get(f"/v1/jobs/{job_id}").json()["placement"]
    assert [(share["host"], len(share["devices"])) for share in placement] == [("fake", 2)]


def test_a_drained_host_gets_no_work_until_it_resumes(client: TestClient, worker: Worker) -> None:
    worker.beat()
    assert client.post("/v1/hosts/fake/drain").json()["draining"] is True
    job_id = submit(client)
    assert worker.store.attempts.place() == []
    assert client.post("/v1/hosts/fake/resume").json()["draining"] is False
    assert worker.store.attempts.place() == [job_id]
    assert client.post("/v1/hosts/nobody/drain").status_code == 404


def test_an_overcommitted_host_names_the_jobs_that_a_caller_may_read(client: TestClient, store: Store) -> None:
    by = [{"job": "job_hidden", "program": "", "threads": 90}, {"job": None, "program": "make of ann", "threads": 7}]
    found = Overcommitment.model_validate({"load": 97.0, "cores": 16, "by": by})
    store.hosts.beat(HostReport("busy", "10.0.0.1", overcommitted=found))
    (host,) = client.get("/v1/hosts").json()["items"]
    assert host["overcommitted"] == found.model_dump(mode="json")
    store.projects.create("theirs")
    secret = store.keys.create("bob", ["read"], "theirs")[1]
    (host,) = client.get("/v1/hosts", headers={"Authorization": f"Bearer {secret}"}).json()["items"]
    assert [(one["job"], one["program"], one["threads"]) for one in host["overcommitted"]["by"]] == [
        (None, "", 90), (None, "", 7),
    ]  # fmt: skip
    store.hosts.beat(HostReport("busy", "10.0.0.1"))
    assert client.get("/v1/hosts").json()["items"][0]["overcommitted"] is None


def test_every_kind_has_a_schema(client: TestClient) -> None:
    assert [kind["kind"] for kind in client.get("/v1/kinds").json()["items"]] == list(KINDS.provided)
    for kind in KINDS.provided:
        schema = client.get(f"/v1/kinds/{kind}/schema").json()
        assert schema["additionalProperties"] is False
        own = {"chain": "jobs", "run": "program", "script": "entry"}.get(kind, "model")
        assert {own, "parallel", "priority"} <= set(schema["properties"])
    answer = client.get("/v1/kinds/cook/schema")
    assert answer.status_code == 404
    assert "train" in answer.json()["detail"]


def test_keys_are_made_listed_and_revoked(client: TestClient) -> None:
    made = client.post("/v1/keys", json={"name": "ann@lab", "scopes": ["submit", "submit"]})
    key = made.json()
    assert made.status_code == 201
    assert key["secret"].startswith(f"tvt_{key['id']}_")
    assert key["scopes"] == ["submit"]
    listed = {entry["id"]: entry for entry in client.get("/v1/keys").json()["items"]}
    assert listed[key["id"]] == {name: value for name, value in key.items() if name != "secret"}
    assert client.delete(f"/v1/keys/{key['id']}").status_code == 204
    assert client.delete(f"/v1/keys/{key['id']}").status_code == 404


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a:b"}, "name"),
        ({"name": "a", "scopes": []}, "scopes"),
        ({"name": "a", "scopes": ["root"]}, "scopes.0"),
        ({"name": "a", "scope": ["read"]}, "scope"),
    ],
)
def test_a_bad_key_request_is_refused(client: TestClient, body: dict[str, Any], path: str) -> None:
    answer = client.post("/v1/keys", json=body)
    assert answer.status_code == 422
    assert path in [error["path"] for error in answer.json()["errors"]]


def test_a_key_does_not_revoke_itself(client: TestClient) -> None:
    own = next(key for key in client.get("/v1/keys").json()["items"] if key["name"] == "admin")
    assert client.delete(f"/v1/keys/{own['id']}").status_code == 409
    assert client.get("/v1/keys").status_code == 200


def test_health_and_readiness_need_no_key(anonymous: TestClient) -> None:
    assert anonymous.get("/healthz").json() == {"status": "ok"}
    ready = anonymous.get("/readyz").json()
    assert ready["status"] == "ready"
    assert 0 < ready["broker_s"] < 5
    assert ready["survives_power_loss"] is False, "the broker of these tests syncs every second"
    assert (ready["hosts"], ready["isolation"]) == (0, dict.fromkeys(ISOLATION_PARTS, 0))
    assert ready["torch"] == []


def test_readiness_tells_which_torch_hosts_have_and_whether_it_was_tried(client: TestClient, store: Store) -> None:
    for name, version in (("a", "2.13.0+cpu"), ("b", "2.13.0+cpu"), ("c", "2.99.0")):
        store.hosts.beat(HostReport(name, "10.0.0.1", versions={"torch": version}))
    told = client.get("/readyz").json()["torch"]
    assert told == [{"version": "2.13.0+cpu", "tried": True}, {"version": "2.99.0", "tried": False}]


def test_hosts_and_readiness_tell_what_keeps_ranks_apart(client: TestClient, store: Store) -> None:
    store.hosts.beat(HostReport("bare", "10.0.0.1", isolation=("limits",)))
    store.hosts.beat(HostReport("full", "10.0.0.2", isolation=("limits", "files", "network", "broker")))
    hosts = {host["name"]: host["isolation"] for host in client.get("/v1/hosts").json()["items"]}
    assert hosts == {"bare": ["limits"], "full": ["limits", "files", "network", "broker"]}
    ready = client.get("/readyz").json()
    assert (ready["hosts"], ready["isolation"]["limits"], ready["isolation"]["broker"]) == (2, 2, 1)


def numbers(client: TestClient) -> dict[tuple[str, ...], float]:
    text = client.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_numbers_for_prometheus_follow_the_fleet(client: TestClient, worker: Worker) -> None:
    quiet = numbers(client)
    assert quiet["trivet_jobs", "queued"] == 0
    assert quiet["trivet_queue_wait_seconds",] == 0
    running = submit(client, parallel={"tp": 2})
    worker.start(running)
    submit(client, {**TRAIN, "parallel": {"dp_shard": 4}}, priority=50)
    busy = numbers(client)
    assert (busy["trivet_jobs", "running"], busy["trivet_jobs", "queued"]) == (1, 1)
    assert (busy["trivet_hosts", "alive"], busy["trivet_hosts", "lost"]) == (1, 0)
    assert (busy["trivet_devices", "cpu"], busy["trivet_devices_free", "cpu"]) == (4, 2)
    assert 0 < busy["trivet_queue_wait_seconds",] < 60
