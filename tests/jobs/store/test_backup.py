"""A backup that is made while the service runs holds all of it, and nothing of it runs twice once it is restored."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from digits import digits_job

from service.jobs.events import pack
from service.jobs.events.packed import open_record
from service.jobs.files import DataLayout, Folder
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.records import Artifact, AttemptRef, PartOutcome, Superseded
from service.jobs.spec.train import TrainSpec
from service.jobs.store import HostReport, JobFilter, Store, StoreLimits, backup
from service.jobs.store.backup import BackupError

SPEC = TrainSpec.model_validate(digits_job(steps=3, batch={"global": 1}))
LIMITS = StoreLimits(lease_s=3600, starting_lease_s=3600, heartbeat_s=3600)
WEIGHTS = b"weights" * 1000


@dataclass
class Place:
    """A data folder with its running broker."""

    layout: DataLayout
    store: Store

    def run(self, job_id: str) -> AttemptRef:
        """The job is running here from now on."""
        self.store.hosts.beat(HostReport("here", "here", cpu_slots=4))
        assert job_id in self.store.attempts.place()
        ref = AttemptRef(job_id, self.store.jobs.get(job_id).attempt, "here")
        self.store.attempts.claim(ref, "a supervisor")
        self.store.attempts.emit(
            ref,
            [{"type": "metric", "time": 1.0, "rank": 0, "step": step, "values": {"loss": 0.5}} for step in (1, 2, 3)],
        )
        return ref

    def publish(self, ref: AttemptRef) -> None:
        digest = hashlib.sha256(WEIGHTS).hexdigest()
        folder = self.layout.job(ref.job_id).published
        folder.mkdir(parents=True)
        (folder / digest).write_bytes(WEIGHTS)
        artifact = Artifact(
            name="model.safetensors", bytes=len(WEIGHTS), sha256=digest, media_type="x/y", created_at=datetime.now(UTC)
        )
        self.store.attempts.record_artifact(ref, artifact)


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Place]:
    layout = DataLayout(tmp_path / "old")
    with EmbeddedBroker.start(layout.broker) as broker:
        store = Store.connect(broker.url, layout, LIMITS)
        yield Place(layout, store)
        store.close()


def restored(source: Path, folder: Path) -> tuple[backup.BackupSummary, DataLayout]:
    layout = DataLayout(folder)
    return backup.restore(source, layout, "always"), layout


def sweep_of_one(place: Place) -> str:
    """The one job of a sweep, whose parent runs from now on until its job ends."""
    spec = TrainSpec.model_validate(digits_job(sweep={"grid": {"seed": [1]}}))
    parent, _ = place.store.sweeps.accept(place.store.jobs.submission(spec, "ada"), [({"seed": 1}, SPEC)])
    return place.store.jobs.list(JobFilter(sweep=parent.id)).items[0].id


def test_all_that_the_service_knew_is_there_again(old: Place, tmp_path: Path) -> None:
    done, running, cancelling = (old.store.jobs.submit(SPEC, "ada")[0].id for _ in range(3))
    starting = sweep_of_one(old)
    old.publish(first := old.run(done))
    old.store.attempts.finish(first, PartOutcome("succeeded", result={"steps": 3}))
    refs = {job_id: AttemptRef(job_id, 1, "here") for job_id in (running, cancelling)}
    for ref in refs.values():
        old.store.attempts.claim(ref, "a supervisor")
    old.store.jobs.cancel(cancelling)
    _, secret = old.store.keys.create("ada", ["submit"])
    stored = old.store.files.add([b"tokens"], "text/plain")
    old.layout.admin_key.write_text("tvt_admin_key\n")
    made = backup.make(old.layout, old.store, tmp_path / "backup.tar")
    assert made.vanished == ()
    assert (tmp_path / "backup.tar").stat().st_mode & 0o777 == 0o600
    assert not (old.layout.broker / "dump.rdb").exists()

    found, layout = restored(tmp_path / "backup.tar", tmp_path / "new")
    assert (found.files, found.bytes) == (made.files, made.bytes)
    assert set(found.queued) == {running, starting}
    with EmbeddedBroker.start(layout.broker) as broker:
        store = Store.connect(broker.url, layout, LIMITS)
        assert store.jobs.get(done) == old.store.jobs.get(done)
        assert store.jobs.get(running).state == "queued"
        assert store.jobs.get(cancelling).state == "cancelled"
        assert (
            "when the backup was made" in store.events.page(running, after="0-0", limit=100).items[-1].event["reason"]
        )
        events, before = (each.events.page(done, after="0-0", limit=100).items for each in (store, old.store))
        assert events == before
        artifact, _ = store.artifacts.open(done, "model.safetensors")
        content = store.artifacts.read(done, "model.safetensors", artifact.bytes)
        assert hashlib.sha256(content).hexdigest() == artifact.sha256
        verified = store.keys.verify(secret)
        assert verified is not None
        assert verified.name == "ada"
        assert store.files.get(stored.id)[1].read_bytes() == b"tokens"
        assert layout.admin_key.read_text() == "tvt_admin_key\n"
        assert store.hosts.list() == []
        store.close()


def test_no_supervisor_of_the_old_service_may_write_to_the_new_one(old: Place, tmp_path: Path) -> None:
    """Also one that began after the backup was made, whose number the new service would give next."""
    job, _ = old.store.jobs.submit(SPEC, "ada")
    ref = old.run(job.id)
    backup.make(old.layout, old.store, tmp_path / "backup.tar")
    _, layout = restored(tmp_path / "backup.tar", tmp_path / "new")
    with EmbeddedBroker.start(layout.broker) as broker:
        new = Place(layout, Store.connect(broker.url, layout, LIMITS))
        taken = new.run(job.id)
        assert taken.attempt > 1000
        for attempt in range(1, 20):
            theirs = AttemptRef(job.id, attempt, "here")
            with pytest.raises(Superseded):
                new.store.attempts.claim(theirs, "a supervisor")
            assert new.store.attempts.renew(theirs) == "lost"
            with pytest.raises(Superseded):
                new.store.attempts.finish(theirs, PartOutcome("succeeded", result={"steps": 3}))
        assert old.store.attempts.renew(ref) == "run"
        assert new.store.attempts.finish(taken, PartOutcome("succeeded", result={"steps": 3})).state == "succeeded"
        new.store.close()


def test_a_backup_is_of_one_moment_while_jobs_are_submitted_and_deleted(old: Place, tmp_path: Path) -> None:
    over, accepted = threading.Event(), list[str]()

    def work() -> None:
        while not over.is_set():
            job, _ = old.store.jobs.submit(SPEC, "ada")
            folder = old.layout.job(job.id).artifacts
            folder.mkdir(parents=True)
            (folder / "file").write_bytes(os.urandom(4096))
            accepted.append(job.id)
            if len(accepted) % 3 == 0:
                old.store.jobs.cancel(accepted[-3])
                old.store.jobs.delete(accepted[-3])

    worker = threading.Thread(target=work)
    worker.start()
    try:
        while len(accepted) < 30:
            time.sleep(0.01)
        known = {job_id for job_id in list(accepted) if accepted.index(job_id) % 3}
        backup.make(old.layout, old.store, tmp_path / "backup.tar")
    finally:
        over.set()
        worker.join()
    _, layout = restored(tmp_path / "backup.tar", tmp_path / "new")
    with EmbeddedBroker.start(layout.broker) as broker:
        store = Store.connect(broker.url, layout, LIMITS)
        there = {job.id for job in store.jobs.list(limit=1000).items}
        assert known - set(accepted[-3:]) <= there
        assert there <= set(accepted)
        assert all((layout.job(job_id).artifacts / "file").exists() for job_id in known & there)
        store.close()


def test_a_record_that_is_packed_meanwhile_is_in_it(
    old: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = old.layout.job("job_x").attempt(1)
    attempt.mkdir(parents=True)
    for name in ("events.jsonl", "events.rank-0.jsonl"):
        (attempt / name).write_text("{}\n")
    add = backup._add

    def then_pack(tar: Any, file: Any, name: str, contents: Any) -> bool:
        whole = add(tar, file, name, contents)
        if name.endswith("/events.jsonl"):
            with Folder.open(attempt) as folder:
                pack(folder)
        return whole

    monkeypatch.setattr(backup, "_add", then_pack)
    assert backup.make(old.layout, old.store, tmp_path / "backup.tar").vanished == ()
    _, layout = restored(tmp_path / "backup.tar", tmp_path / "new")
    with Folder.open(layout.job("job_x").attempt(1)) as folder:
        assert open_record(folder, "events.rank-0.jsonl").read() == b"{}\n"


def test_no_job_keeps_the_rest_from_being_backed_up(old: Place, tmp_path: Path) -> None:
    """By names that no path can hold or that are no text, or by a file that it cuts short while it is read."""
    job, _ = old.store.jobs.submit(SPEC, "ada")
    ref = old.run(job.id)
    old.publish(ref)
    artifacts = old.layout.job(job.id).artifacts
    artifacts.mkdir(parents=True)
    (artifacts / os.fsdecode(b"\xff")).write_text("no text")
    handle = os.open(artifacts, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=handle)
        handle = os.open("d" * 250, os.O_RDONLY, dir_fd=handle)
    os.close(os.open("deep", os.O_CREAT | os.O_WRONLY, dir_fd=handle))
    cut = artifacts / "cut"
    cut.write_bytes(WEIGHTS * 1000)
    stopped = threading.Event()

    def flip() -> None:
        while not stopped.is_set():
            os.truncate(cut, 0)
            os.truncate(cut, 64 << 20)

    flipping = threading.Thread(target=flip)
    flipping.start()
    try:
        made = backup.make(old.layout, old.store, tmp_path / "backup.tar")
    finally:
        stopped.set()
        flipping.join()
    assert [name.rpartition("/")[2] for name in made.unusable if not name.endswith("/cut")] == ["deep", "?"]
    _, layout = restored(tmp_path / "backup.tar", tmp_path / "new")
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    assert (layout.job(job.id).published / digest).read_bytes() == WEIGHTS


def test_nothing_is_written_over(old: Place, tmp_path: Path) -> None:
    target = tmp_path / "backup.tar"
    backup.make(old.layout, old.store, target)
    with pytest.raises(BackupError, match="exists already"):
        backup.make(old.layout, old.store, target)
    with pytest.raises(BackupError, match="is not empty"):
        backup.restore(target, old.layout, "always")


@pytest.mark.parametrize("damage", ["a byte", "its end", "all of it"])
def test_a_damaged_backup_is_refused_and_leaves_nothing(old: Place, tmp_path: Path, damage: str) -> None:
    target = tmp_path / "backup.tar"
    old.layout.files.mkdir(parents=True)
    (old.layout.files / "file").write_bytes(os.urandom(100_000))
    backup.make(old.layout, old.store, target)
    content = bytearray(target.read_bytes())
    if damage == "a byte":
        content[len(content) // 2] ^= 1
    elif damage == "its end":
        del content[len(content) // 2 :]
    else:
        content = bytearray(b"something else" * 100)
    target.write_bytes(content)
    with pytest.raises(BackupError, match=r"damaged|cut short|no backup"):
        backup.restore(target, DataLayout(tmp_path / "new"), "always")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["data/../../escaped", "/data/jobs/x", "data/broker/users.acl", "data", "x"])
def test_a_member_of_another_place_is_refused(tmp_path: Path, name: str) -> None:
    source = tmp_path / "backup.tar"
    with tarfile.open(source, "w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(BackupError, match="no member of a backup"):
        backup.restore(source, DataLayout(tmp_path / "new"), "always")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup.tar"]


@pytest.mark.slow
def test_the_commands_say_what_they_did(old: Place, tmp_path: Path) -> None:
    job, _ = old.store.jobs.submit(SPEC, "ada")
    old.run(job.id)
    outer = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET_")}

    def trivet(*words: str, data: Path, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**outer, "TRIVET_DATA": str(data), **more}
        command = [sys.executable, "-m", "trivet", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    target = str(tmp_path / "backup.tar")
    made = trivet("backup", target, data=old.layout.root)
    assert (made.returncode, "files" in made.stdout) == (0, True), made.stderr
    found = trivet("restore", target, data=tmp_path / "new")
    assert found.returncode == 0, found.stderr
    assert job.id in found.stdout
    nobody = trivet("backup", str(tmp_path / "other"), data=tmp_path / "nothing")
    assert (nobody.returncode, "is 'trivet up' running" in nobody.stderr) == (2, True), nobody.stderr
    elsewhere = trivet("backup", str(tmp_path / "other"), data=old.layout.root, TRIVET_REDIS_URL="redis://localhost:1")
    assert (elsewhere.returncode, "by its own means" in elsewhere.stderr) == (2, True), elsewhere.stderr
