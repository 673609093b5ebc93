"""Files and artifacts: streamed in, addressed by content or manifest, never outside their folders."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_builders import LIMITS, World

from service.jobs.files import DataLayout
from service.jobs.records import Artifact, AttemptRef, Conflict, NotFound
from service.jobs.store import Store, StoreLimits, StoreUnavailable, TooLarge, stubs
from service.jobs.store.artifacts import checked_name
from service.jobs.store.keyspace import JOB_ARTIFACTS


def on_disk(data: DataLayout) -> list[Path]:
    return [path for path in data.files.rglob("*") if path.is_file()]


def test_a_file_is_its_content(store: Store, data: DataLayout) -> None:
    stored = store.files.add(io.BytesIO(b"weights"), "application/octet-stream")
    digest = hashlib.sha256(b"weights").hexdigest()
    assert (stored.id, stored.sha256, stored.bytes) == (f"file_{digest}", digest, 7)
    found, path = store.files.get(stored.id)
    assert found == stored
    assert path.read_bytes() == b"weights"
    assert store.files.add([b"wei", b"ghts"], "text/plain") == stored
    assert len(on_disk(data)) == 1


def test_too_large_an_upload_keeps_nothing(broker: str, store: Store, data: DataLayout) -> None:
    small = Store.connect(broker, data, StoreLimits(max_file_bytes=10))
    assert small.files.add([b"0123456789"], "text/plain").bytes == 10
    with pytest.raises(TooLarge, match="10 bytes"):
        small.files.add(iter([b"01234", b"56789", b"x"]), "text/plain")
    assert len(on_disk(data)) == 1
    small.close()


def test_an_upload_that_breaks_off_keeps_nothing(store: Store, data: DataLayout) -> None:
    def broken() -> Any:
        yield b"some"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        store.files.add(broken(), "text/plain")
    assert on_disk(data) == []


def test_a_writer_without_commit_keeps_nothing(store: Store, data: DataLayout) -> None:
    with store.files.writer() as writer:
        writer.write(b"some")
    assert on_disk(data) == []


def test_what_could_not_be_entered_is_kept_only_until_uploads_expire(
    store: Store, data: DataLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> str:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(stubs, "add_upload", away)
        with pytest.raises(StoreUnavailable):
            store.files.add([b"lost"], "text/plain")
    held = store.files.add([b"held"], "text/plain")
    store.files.expire()
    assert on_disk(data) == [data.file(held.id)]


@pytest.mark.parametrize("name", ["file_" + "0" * 64, "file_1", "../../etc/passwd"])
def test_unknown_files_are_not_found(store: Store, name: str) -> None:
    with pytest.raises(NotFound):
        store.files.get(name)


def test_a_file_whose_bytes_are_gone_is_not_found(store: Store) -> None:
    stored = store.files.add([b"x"], "text/plain")
    store.files.get(stored.id)[1].unlink()
    with pytest.raises(NotFound, match="missing"):
        store.files.get(stored.id)


@pytest.fixture
def ref(store: Store, world: World) -> AttemptRef:
    world.beat("a", cpu=1)
    (only,) = world.start(world.submit())
    return only


def artifact(name: str) -> Artifact:
    return Artifact(name=name, bytes=1, sha256="0" * 64, media_type="text/plain", created_at=datetime.now(UTC))


def publish(store: Store, data: DataLayout, ref: AttemptRef, name: str) -> Path:
    path = data.job(ref.job_id).artifacts / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    store.attempts.record_artifact(ref, artifact(name))
    return path


def test_artifacts_are_listed_by_name_and_announced(store: Store, data: DataLayout, ref: AttemptRef) -> None:
    for name in ("model.json", "plots/a b.png", "model.json"):
        publish(store, data, ref, name)
    assert [each.name for each in store.artifacts.list(ref.job_id)] == ["model.json", "plots/a b.png"]
    assert store.artifacts.open(ref.job_id, "plots/a b.png")[0].name == "plots/a b.png"
    assert store.artifacts.read(ref.job_id, "plots/a b.png", 1) == b"x"
    with pytest.raises(NotFound, match="at most 0 bytes"):
        store.artifacts.read(ref.job_id, "plots/a b.png", 0)
    events = store.events.page(ref.job_id, types={"artifact"}).items
    assert [stored.event["name"] for stored in events] == ["model.json", "plots/a b.png", "model.json"]
    assert events[0].event["bytes"] == 1


def test_only_what_is_in_the_manifest_is_given_out(store: Store, data: DataLayout, ref: AttemptRef) -> None:
    path = publish(store, data, ref, "known")
    path.with_name("unknown").write_text("x")
    with pytest.raises(NotFound):
        store.artifacts.open(ref.job_id, "unknown")


def test_a_job_has_no_more_artifacts_than_it_may(broker: str, store: Store, data: DataLayout, ref: AttemptRef) -> None:
    """What it has already may come again, also smaller, and the limits are the job's, whatever others have."""
    limited = Store.connect(broker, data, replace(LIMITS, max_job_artifacts=2, max_job_artifact_bytes=10))

    def record(name: str, size: int) -> None:
        limited.attempts.record_artifact(ref, artifact(name).model_copy(update={"bytes": size}))

    record("a", 4)
    record("b", 6)
    with pytest.raises(Conflict, match=r"has 2 artifacts, the most that are allowed \(TRIVET_MAX_JOB_ARTIFACTS\)"):
        record("c", 0)
    with pytest.raises(Conflict, match="has 5 bytes and the job's other artifacts 6, and together they may have 10"):
        record("a", 5)
    record("b", 5)
    record("a", 5)
    assert [(each.name, each.bytes) for each in store.artifacts.list(ref.job_id)] == [("a", 5), ("b", 5)]
    limited.close()


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/.", "a\\b", "a\0b", "a\nb"])
def test_names_that_are_no_plain_paths_are_refused(store: Store, ref: AttemptRef, name: str) -> None:
    with pytest.raises(ValueError, match="artifact name"):
        store.attempts.record_artifact(ref, artifact(name))
    assert store.artifacts.list(ref.job_id) == []


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(alphabet="ab./\\%\0 ", max_size=12))
def test_a_name_that_passes_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    try:
        checked_name(name)
    except ValueError:
        return
    assert (tmp_path / name).resolve().is_relative_to(tmp_path.resolve())
    assert (tmp_path / name).resolve() != tmp_path.resolve()


@pytest.mark.parametrize("link", ["file", "folder", "root"])
def test_symbolic_links_are_never_followed(store: Store, data: DataLayout, ref: AttemptRef, link: str) -> None:
    path = publish(store, data, ref, "sub/file")
    secret = data.root / "secret"
    linked = {"file": path, "folder": path.parent, "root": data.job(ref.job_id).artifacts}[link]
    linked.rename(secret)
    linked.symlink_to(secret)
    assert path.read_text() == "x"
    with pytest.raises(NotFound):
        store.artifacts.open(ref.job_id, "sub/file")


def test_a_forged_manifest_entry_leads_nowhere(store: Store, data: DataLayout, ref: AttemptRef, redis: Any) -> None:
    data.job(ref.job_id).artifacts.mkdir(parents=True)
    (data.root / "secret").write_text("x")
    name = "../../../secret"
    assert (data.job(ref.job_id).artifacts / name).is_file()
    redis.hset(JOB_ARTIFACTS(ref.job_id), name, artifact(name).model_dump_json())
    with pytest.raises(NotFound):
        store.artifacts.open(ref.job_id, name)


def test_a_folder_is_not_an_artifact_that_can_be_read(store: Store, data: DataLayout, ref: AttemptRef) -> None:
    (data.job(ref.job_id).artifacts / "folder").mkdir(parents=True)
    store.attempts.record_artifact(ref, artifact("folder"))
    with pytest.raises(NotFound):
        store.artifacts.open(ref.job_id, "folder")
