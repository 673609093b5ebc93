"""An attempt that ended leaves what somebody may read, and contents once."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

from service.jobs.files import DataLayout
from service.jobs.records import Artifact
from workers.supervisor.tidying import share_contents, tidy


def test_only_what_somebody_may_read_is_left(tmp_path: Path) -> None:
    paths = DataLayout(tmp_path).job("job_x")
    folder, work = paths.attempt(1), paths.work(1)
    work.mkdir(parents=True)
    for name in ("stacks.rank-0.txt", "log.rank-0.jsonl", "events.rank-0.jsonl", "gate-artifacts.json", "spec.json"):
        (folder / name).write_text("{}" if name.endswith(".json") else "")
    (folder / "stacks.rank-1.txt").write_text("Thread 1")
    (work / "result.json").write_text("{}")
    tidy(paths, 1, [0, 1])
    assert sorted(path.name for path in folder.iterdir()) == ["events.rank-0.jsonl", "spec.json", "stacks.rank-1.txt"]
    work.mkdir()
    (work / "of-the-script").write_text("its own")
    tidy(paths, 1, [0])
    assert (work / "of-the-script").exists()


def test_an_artifact_that_is_what_was_published_is_the_same_file(tmp_path: Path) -> None:
    paths = DataLayout(tmp_path).job("job_x")
    (paths.artifacts / "a").mkdir(parents=True)
    paths.published.mkdir()
    manifest = []
    for name, content, now in (("a/same", b"content", b"content"), ("changed", b"before", b"after")):
        digest = hashlib.sha256(content).hexdigest()
        (paths.published / digest).write_bytes(content)
        (paths.artifacts / name).write_bytes(now)
        manifest.append(
            Artifact(name=name, bytes=len(content), sha256=digest, media_type="", created_at=datetime.now(UTC))
        )
    share_contents(paths, manifest)
    assert (paths.artifacts / "a" / "same").samefile(paths.published / manifest[0].sha256)
    assert (paths.artifacts / "changed").read_bytes() == b"after"
    assert (paths.published / manifest[1].sha256).read_bytes() == b"before"
