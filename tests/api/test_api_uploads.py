"""Uploads: each project knows of its own, with their use; deleted by hand or when nobody used them for long."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis as redis_py
from api_world import TRAIN, Keys, Worker, bearer
from fastapi.testclient import TestClient

from service.jobs.settings import Settings
from service.jobs.store import Store, files
from service.jobs.store.files import FileWriter
from service.jobs.store.keyspace import FILES, UPLOADS, UPLOADS_USED

TEXT = b"to be or not to be, that is the question. " * 40


def asking(file_id: str, **fields: Any) -> dict[str, Any]:
    """A training job over an uploaded text."""
    family = {"family": "transformer", "vocab_size": 256, "dim": 16, "layers": 1, "heads": 2}
    data = {"source": "file", "format": "tokens", "file": file_id, "encoding": "uint8", "sequence": 16}
    return {**TRAIN, "model": family, "data": {**data, "vocabulary": 256}, **fields}


def upload(client: TestClient, secret: str, content: bytes = TEXT, **params: str) -> str:
    answer = client.post("/v1/files", content=content, params=params, headers=bearer(secret))
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def listed(client: TestClient, secret: str) -> list[dict[str, Any]]:
    return list(client.get("/v1/files", headers=bearer(secret)).json()["items"])


def age(redis: redis_py.Redis, project: str, file_id: str) -> None:
    """Let the last use of an upload be long ago."""
    assert redis.zadd(UPLOADS_USED(), {f"{project}/{file_id}": 1}, xx=True, ch=True) == 1


@pytest.fixture
def vera(keys: Keys) -> str:
    return keys.of("vision", "submit", "vera")


@pytest.fixture
def fred(keys: Keys) -> str:
    return keys.of("language", "submit", "fred")


def test_an_upload_is_listed_with_its_name_and_its_use(client: TestClient, vera: str) -> None:
    file_id = upload(client, vera, name="hamlet.txt")
    job = client.post("/v1/jobs", json=asking(file_id), headers=bearer(vera)).json()["id"]
    (found,) = listed(client, vera)
    assert (found["id"], found["name"], found["bytes"]) == (file_id, "hamlet.txt", len(TEXT))
    assert (found["project"], found["owner"]) == ("vision", "vera")
    assert (found["jobs"], found["job_count"], found["in_use"], found["expires_at"]) == ([job], 1, True, None)
    client.post(f"/v1/jobs/{job}/cancel")
    (found,) = listed(client, vera)
    assert not found["in_use"]
    assert found["expires_at"] > found["last_used_at"]
    client.delete(f"/v1/jobs/{job}")
    assert listed(client, vera)[0]["jobs"] == []
    form = {"file": ("from a form.txt", b"x", "text/plain")}
    assert client.post("/v1/files", files=form, headers=bearer(vera)).json()["name"] == "from a form.txt"


def test_pages_of_uploads(client: TestClient, vera: str) -> None:
    """Also of those that are deleted, page by page, while others come."""
    made = [upload(client, vera, bytes([65 + number])) for number in range(5)]
    seen, cursor = [], None
    while True:
        params = {"limit": 2} if cursor is None else {"limit": 2, "cursor": cursor}
        page = client.get("/v1/files", params=params, headers=bearer(vera)).json()
        seen += [each["id"] for each in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        for file_id in seen[-2:]:
            client.delete(f"/v1/files/{file_id}", headers=bearer(vera))
        upload(client, vera, cursor.encode())
    assert seen == made[::-1]
    assert page["total"] == 3


def test_a_project_knows_of_no_other_ones_uploads(client: TestClient, vera: str, fred: str) -> None:
    """Also where it uploads the same content, and where it knows the hash."""
    file_id = upload(client, vera, name="ours.txt")
    assert listed(client, fred) == []
    assert client.get(f"/v1/files/{file_id}", headers=bearer(fred)).status_code == 404
    assert client.delete(f"/v1/files/{file_id}", headers=bearer(fred)).status_code == 404
    refused = client.post("/v1/jobs", json=asking(file_id), headers=bearer(fred))
    assert refused.status_code == 422
    assert f"there is no {file_id}" in refused.json()["detail"]
    again = client.post("/v1/files", content=TEXT, params={"name": "mine.txt"}, headers=bearer(fred))
    assert (again.status_code, again.json()["name"], again.json()["owner"]) == (201, "mine.txt", "fred")
    assert client.post("/v1/jobs", json=asking(file_id), headers=bearer(fred)).status_code == 201
    assert [each["name"] for each in listed(client, vera)] == ["ours.txt"]
    assert listed(client, vera)[0]["jobs"] == []


def test_content_goes_with_the_last_project_that_has_it(
    client: TestClient, settings: Settings, vera: str, fred: str
) -> None:
    file_id = upload(client, vera)
    assert upload(client, fred) == file_id
    assert client.delete(f"/v1/files/{file_id}", headers=bearer(vera)).status_code == 204
    assert client.get(f"/v1/files/{file_id}", headers=bearer(vera)).status_code == 404
    assert client.get(f"/v1/files/{file_id}", headers=bearer(fred)).content == TEXT
    assert client.delete(f"/v1/files/{file_id}", headers=bearer(fred)).status_code == 204
    assert not settings.layout.file(file_id).exists()
    assert upload(client, vera) == file_id
    assert client.get(f"/v1/files/{file_id}", headers=bearer(vera)).content == TEXT


def test_what_an_unfinished_job_names_stays(client: TestClient, worker: Worker, vera: str) -> None:
    file_id = upload(client, vera)
    job = client.post("/v1/jobs", json=asking(file_id), headers=bearer(vera)).json()["id"]
    ref = worker.start(job)
    refused = client.delete(f"/v1/files/{file_id}", headers=bearer(vera))
    assert refused.status_code == 409
    assert job in refused.json()["detail"]
    worker.fail(ref)
    assert client.delete(f"/v1/files/{file_id}", headers=bearer(vera)).status_code == 204
    gone = client.post(f"/v1/jobs/{job}/retry", headers=bearer(vera))
    assert gone.status_code == 409
    assert file_id in gone.json()["detail"]
    upload(client, vera)
    assert client.post(f"/v1/jobs/{job}/retry", headers=bearer(vera)).status_code == 202


def test_only_who_uploaded_it_and_maintainers_delete_an_upload(client: TestClient, keys: Keys, vera: str) -> None:
    file_id = upload(client, vera)
    refused = client.delete(f"/v1/files/{file_id}", headers=bearer(keys.of("vision", "submit", "vic")))
    assert refused.status_code == 403
    assert "'vera'" in refused.json()["detail"]
    maintainer = bearer(keys.of("vision", "admin", "meg"))
    assert client.delete(f"/v1/files/{file_id}", headers=maintainer).status_code == 204
    own = upload(client, vera)
    assert client.get(f"/v1/files/{own}").content == TEXT  # an operator reads all
    assert client.delete(f"/v1/files/{own}", params={"project": "vision"}).status_code == 204


def test_uploads_expire_when_nobody_uses_them(
    client: TestClient, store: Store, redis: redis_py.Redis, vera: str, fred: str
) -> None:
    path_of = store.files.data.file
    unused, used, fresh = (upload(client, vera, content) for content in (b"unused", TEXT, b"fresh"))
    upload(client, fred, b"unused")
    client.post("/v1/jobs", json=asking(used), headers=bearer(vera))
    for file_id in (unused, used):
        age(redis, "vision", file_id)
    assert store.files.expire() == 1
    assert {each["id"] for each in listed(client, vera)} == {used, fresh}
    assert path_of(unused).is_file()
    age(redis, "language", unused)
    assert store.files.expire() == 1
    assert not path_of(unused).exists()
    assert store.files.expire() == 0


def test_uploads_of_older_versions_belong_to_the_default_project(
    client: TestClient, store: Store, redis: redis_py.Redis, keys: Keys
) -> None:
    file_id = upload(client, keys["submit"])
    old = f'{{"id":"{file_id}","sha256":"{hashlib.sha256(TEXT).hexdigest()}","bytes":{len(TEXT)},"media_type":"x"}}'
    redis.delete(UPLOADS("default"), UPLOADS_USED())
    redis.hset(FILES(), file_id, old)
    store.jobs.adopt()
    (found,) = listed(client, keys["read"])
    assert (found["id"], found["project"], found["created_at"]) == (file_id, "default", None)
    assert client.post("/v1/jobs", json=asking(file_id), headers=bearer(keys["submit"])).status_code == 201
    assert redis.exists(FILES()) == 0


def test_an_upload_that_is_too_large_is_refused_before_its_content_is_sent(
    client: TestClient, vera: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def content() -> Iterator[bytes]:
        sent.append(1)
        yield TEXT

    sent: list[int] = []
    monkeypatch.setattr(FileWriter, "write", lambda *_: sent.append(2))
    headers = {**bearer(vera), "Content-Length": "100001"}
    refused = client.post("/v1/files", content=content(), headers=headers)
    assert (refused.status_code, "TRIVET_MAX_FILE_BYTES" in refused.json()["detail"]) == (413, True)
    assert 2 not in sent
    assert not list(store.artifacts.data.files.glob("upload-*"))


@pytest.mark.parametrize("form", ["length", "chunks"])
def test_an_upload_that_the_disk_has_no_room_for_is_refused(
    client: TestClient, vera: str, store: Store, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the disk is full, without which the broker could answer nobody."""
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(total=2000, free=1000))
    monkeypatch.setattr(files, "_LOOK_EVERY", 100)
    content = b"x" * 951
    refused = client.post("/v1/files", content=content if form == "length" else iter([content]), headers=bearer(vera))
    assert (refused.status_code, "disk is full" in refused.json()["detail"]) == (507, True)
    assert not list(store.artifacts.data.files.glob("upload-*"))
    assert client.post("/v1/files", content=b"x" * 890, headers=bearer(vera)).status_code == 201
