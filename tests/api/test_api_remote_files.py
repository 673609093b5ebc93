"""What hosts without a common folder have put into an object store is served from there."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import BinaryIO, cast

import pytest
import redis as redis_py
from api_world import MLP, TRAIN, Keys, Worker, bearer, submit
from fastapi.testclient import TestClient
from pydantic import SecretStr

from api.main import create_app
from service.jobs.files.objects import ObjectStore, TreeManifest, job_files, record_tree, state_tree
from service.jobs.records import Artifact, AttemptRef
from service.jobs.settings import Settings
from service.jobs.store import Store

CONTENT = bytes(range(256)) * 4
RANGES = {"bytes=10-19": CONTENT[10:20], "bytes=1000-": CONTENT[1000:], "bytes=-5": CONTENT[-5:]}


@pytest.fixture(scope="module")
def settings(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Those of a service whose hosts share no folder."""
    return Settings(
        data=tmp_path_factory.mktemp("data"),
        redis_url=SecretStr(broker),
        allowed_hosts="testserver",
        store=f"memory://{uuid.uuid4().hex}",
    )


@pytest.fixture(scope="module")
def running(settings: Settings) -> Iterator[tuple[TestClient, Store]]:
    store = Store.connect(settings.broker_url, settings.layout, settings.store_limits)
    with TestClient(create_app(settings, store)) as client:
        yield client, store
    store.close()


@pytest.fixture
def apart(running: tuple[TestClient, Store], redis: redis_py.Redis) -> Store:
    return running[1]


@pytest.fixture
def objects(apart: Store) -> ObjectStore:
    assert apart.artifacts.objects is not None
    return apart.artifacts.objects


@pytest.fixture
def here(running: tuple[TestClient, Store], apart: Store) -> TestClient:
    running[0].headers.update(bearer(Keys(apart)["admin"]))
    return running[0]


@pytest.fixture
def ref(here: TestClient, apart: Store) -> AttemptRef:
    return Worker(apart).start(submit(here))


def named(objects: ObjectStore, ref: AttemptRef, tree: str, files: dict[str, bytes]) -> None:
    """Make a tree of a job consist of these files."""
    stored = {}
    for name, content in files.items():
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            stored[name] = objects.put(job_files(ref.job_id), tree, cast(BinaryIO, file))
    objects.name_files(job_files(ref.job_id), tree, TreeManifest(files=stored))


def test_an_artifact_is_read_whole_and_in_ranges(
    here: TestClient, apart: Store, objects: ObjectStore, ref: AttemptRef
) -> None:
    named(objects, ref, "published", {"a/b.bin": CONTENT})
    digest, made = hashlib.sha256(CONTENT).hexdigest(), datetime.now(UTC)
    artifact = Artifact(name="a/b.bin", bytes=len(CONTENT), sha256=digest, media_type="image/png", created_at=made)
    apart.attempts.record_artifact(ref, artifact)
    url = f"/v1/jobs/{ref.job_id}/artifacts/a/b.bin"
    whole = here.get(url)
    assert (whole.status_code, whole.content, whole.headers["ETag"]) == (200, CONTENT, f'"{digest}"')
    assert here.get(url, headers={"If-None-Match": f'"{digest}"'}).status_code == 304
    for asked, expected in RANGES.items():
        part = here.get(url, headers={"Range": asked})
        assert (part.status_code, part.content) == (206, expected)
        assert part.headers["Content-Range"].endswith(f"/{len(CONTENT)}")
    assert here.get(url, headers={"Range": "bytes=0-1,5-6"}).content == CONTENT
    assert here.get(url, headers={"Range": "bytes=5000-"}).status_code == 416
    objects.remove(f"{job_files(ref.job_id)}/published")
    assert here.get(url).status_code == 404


def test_checkpoints_of_a_job_that_runs_elsewhere_are_listed_read_and_resumed(
    here: TestClient, apart: Store, objects: ObjectStore, ref: AttemptRef
) -> None:
    files = {"checkpoints/step_4/meta.json": b"{}", "checkpoints/step_4/x": b"weights", "artifacts/metrics": b"m"}
    named(objects, ref, state_tree(1), files)
    (item,) = here.get(f"/v1/jobs/{ref.job_id}/artifacts").json()["items"]
    assert (item["name"], item["bytes"]) == ("checkpoints/step_4", 9)
    tar = here.get(f"/v1/jobs/{ref.job_id}/artifacts/checkpoints/step_4")
    with tarfile.open(fileobj=io.BytesIO(tar.content)) as archive:
        assert sorted(archive.getnames()) == ["step_4/meta.json", "step_4/x"]
    Worker(apart).fail(ref)
    resumed = {**TRAIN, "steps": 20, "resume": {"job": ref.job_id, "step": 4}}
    assert here.post("/v1/jobs", json=resumed).status_code == 201
    refused = here.post("/v1/jobs", json={**resumed, "resume": {"job": ref.job_id, "step": 5}})
    assert (refused.status_code, "no checkpoint of step 5" in refused.text) == (422, True)
    here.delete(f"/v1/jobs/{here.get('/v1/jobs?limit=1').json()['items'][0]['id']}")


def test_what_ranks_printed_elsewhere_is_read_once_their_attempt_has_ended(
    here: TestClient, objects: ObjectStore, ref: AttemptRef
) -> None:
    line = {"type": "log", "time": 1.5, "rank": 0, "stream": "stdout", "line": "from afar"}
    files = {"events.jsonl": json.dumps(line).encode() + b"\n"}
    named(objects, ref, record_tree(1), files)
    assert "from afar" in here.get(f"/v1/jobs/{ref.job_id}/logs").text


def test_an_upload_goes_there_and_comes_back_to_another_data_folder(
    here: TestClient, apart: Store, objects: ObjectStore
) -> None:
    stored = here.post("/v1/files", content=b"weights").json()
    assert objects.read(f"uploads/{stored['sha256']}") == b"weights"
    apart.jobs.data.file(stored["id"]).unlink()
    assert here.get(f"/v1/files/{stored['id']}").content == b"weights"
    assert here.delete(f"/v1/files/{stored['id']}").status_code == 204
    with pytest.raises(FileNotFoundError):
        objects.read(f"uploads/{stored['sha256']}")


def test_a_gang_over_hosts_that_share_no_folder_is_refused(here: TestClient) -> None:
    refused = here.post("/v1/jobs", json={**TRAIN, "model": MLP, "max_hosts": 2, "parallel": {"dp_shard": 2}})
    assert (refused.status_code, "TRIVET_STORE" in refused.text) == (422, True)
