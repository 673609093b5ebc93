"""The manifest tells the truth about the bytes, at every moment."""

from __future__ import annotations

import errno
import hashlib
import os

import pytest
from waiting import eventually
from worker_fleet import SHORT_LEASES, Fleet

from service.jobs.files import Folder, JobPaths
from service.jobs.records import Artifact, AttemptRef
from workers.supervisor.publisher import UnusableArtifact, clear_unpublished, publish


def looked_at(fleet: Fleet, ref: AttemptRef) -> str:
    """The hash in the manifest, which is that of the bytes, however often they are written meanwhile."""
    artifact, file = fleet.store.artifacts.open(ref.job_id, "report.bin")
    assert not isinstance(file, Folder)
    with file:
        content = file.read()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (artifact.bytes, artifact.sha256)
    return artifact.sha256


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("limits", [SHORT_LEASES], ids=["told soon"])
def test_manifest_and_bytes_agree_while_a_job_writes_is_cancelled_and_runs_again(fleet: Fleet) -> None:
    ref = fleet.submit("publishing")
    fleet.supervise(ref)
    eventually(lambda: fleet.store.artifacts.list(ref.job_id))
    seen = set()
    eventually(lambda: seen.add(looked_at(fleet, ref)) or len(seen) >= 3)
    fleet.store.jobs.cancel(ref.job_id)
    assert fleet.ended(ref).state == "cancelled"
    before = looked_at(fleet, ref)
    fleet.store.jobs.retry(ref.job_id)
    fleet.beat()
    assert eventually(fleet.store.attempts.place) == [ref.job_id]
    again = AttemptRef(ref.job_id, 2, ref.host)
    fleet.supervise(again)
    eventually(lambda: looked_at(fleet, again) != before)
    eventually(lambda: seen.add(looked_at(fleet, again)) or len(seen) >= 6)
    fleet.store.jobs.cancel(ref.job_id)
    assert fleet.ended(again).state == "cancelled"
    looked_at(fleet, again)


def test_a_file_that_grows_while_it_is_published_is_not_entered(paths: JobPaths) -> None:
    path = paths.artifacts / "model.safetensors"
    path.write_bytes(b"w" * 100)

    def grow() -> bool:
        with path.open("ab") as file:
            file.write(b"v")
        return False

    with pytest.raises(UnusableArtifact, match="written to while it was published"):
        publish(paths, "model.safetensors", "x/y", copied_bytes=10, is_over=grow)
    assert list(paths.published.iterdir()) == []


def test_a_large_file_is_published_without_a_copy_and_survives_its_replacement(paths: JobPaths) -> None:
    path = paths.artifacts / "model.safetensors"
    path.write_bytes(b"w" * 100)
    artifact = publish(paths, "model.safetensors", "x/y", copied_bytes=10)
    content = paths.published / artifact.sha256
    assert content.samefile(path)
    path.with_suffix(".new").write_bytes(b"v" * 100)
    path.with_suffix(".new").replace(path)
    assert content.read_bytes() == b"w" * 100


def test_a_large_file_that_cannot_be_linked_is_copied_whole(paths: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "this file system has no hard links")

    monkeypatch.setattr(os, "link", refuse)
    (paths.artifacts / "model.safetensors").write_bytes(b"w" * 100)
    artifact = publish(paths, "model.safetensors", "x/y", copied_bytes=10)
    assert (artifact.bytes, (paths.published / artifact.sha256).read_bytes()) == (100, b"w" * 100)


def test_content_that_nothing_refers_to_is_deleted(paths: JobPaths) -> None:
    entries: list[Artifact] = []
    for content in (b"one", b"two"):
        (paths.artifacts / "a").write_bytes(content)
        entries.append(publish(paths, "a", "x/y"))
    (paths.published / ".draft-of-a-killed-supervisor").write_bytes(b"")
    clear_unpublished(paths, entries[1:])
    assert [path.name for path in paths.published.iterdir()] == [entries[1].sha256]
