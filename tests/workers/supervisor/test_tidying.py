"""An attempt that ended leaves what somebody may read, and contents once."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from service.jobs.events import host_file, newest_logged, rank_file, recorded, unpack
from service.jobs.events.curves import read_curves
from service.jobs.files import DataLayout, Folder
from service.jobs.records import Artifact
from workers.supervisor.tidying import compact, share_contents, tidy


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


EVENTS = [
    {"type": "log", "time": 2.0, "rank": 0, "stream": "stdout", "line": "second"},
    {"type": "metric", "time": 3.0, "rank": 0, "step": 1, "values": {"loss": 0.5}},
]


def succeeded(root: Path) -> Path:
    """The folder of a job's only attempt, which has just ended."""
    folder = DataLayout(root).job("job_x").attempt(1)
    folder.mkdir(parents=True)
    rank_file(folder, 0).write_text("".join(f"{json.dumps(event)}\n" for event in EVENTS))
    first = {"type": "log", "time": 1.0, "rank": None, "stream": "service", "line": "first"}
    host_file(folder, "here", leads=True).write_text(json.dumps(first) + "\n")
    (folder / "spec.json").write_text("{}")
    return folder


def read(folder: Path) -> list[list[dict[str, Any]]]:
    return [list(recorded(folder, ["log", "metric"])), list(newest_logged(folder))]


def test_a_packed_record_is_read_as_it_was(tmp_path: Path) -> None:
    folder = succeeded(tmp_path)
    before = read(folder)
    assert [len(each) for each in before] == [3, 2]
    compact(DataLayout(tmp_path).job("job_x"), 1)
    assert [path.name for path in folder.iterdir()] == ["record.zip"]
    assert read(folder) == before
    assert read_curves([folder], None, 100) is None  # there are metrics, so the record must be read
    with Folder.open(folder) as attempt:
        unpack(attempt)
    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", "events.rank-0.jsonl"]
    assert read(folder) == before


@pytest.mark.parametrize("changes", range(6))
def test_a_death_while_a_record_is_packed_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    """After so many changes of the folder: the spec is gone, the draft has its name, and each file is gone."""
    folder, left = succeeded(tmp_path), [changes]
    before = read(folder)

    def counted(change: Any) -> Any:
        def changed(*arguments: Any, **options: Any) -> Any:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return change(*arguments, **options)

        return changed

    with monkeypatch.context() as patched:
        for name in ("unlink", "rename"):
            patched.setattr(os, name, counted(getattr(os, name)))
        try:
            compact(DataLayout(tmp_path).job("job_x"), 1)
        except KeyboardInterrupt:
            assert left == [0]
    assert read(folder) == before


def test_a_damaged_packed_record_hides_no_other_file(tmp_path: Path) -> None:
    folder = succeeded(tmp_path)
    compact(DataLayout(tmp_path).job("job_x"), 1)
    (folder / "record.zip").write_bytes((folder / "record.zip").read_bytes()[:-30])
    assert read(folder) == [[], []]
    rank_file(folder, 0).write_text(f"{json.dumps(EVENTS[0])}\n")
    assert read(folder) == [[EVENTS[0]], [EVENTS[0]]]


@pytest.mark.parametrize(("method", "flags"), [(zipfile.ZIP_DEFLATED, 1), (zipfile.ZIP_LZMA, 0)])
def test_a_zip_that_a_rank_put_there_is_no_record(tmp_path: Path, method: int, flags: int) -> None:
    """An encrypted one raises another error, and LZMA unpacks without a limit, whatever size it claims."""
    folder, content = succeeded(tmp_path), io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as packed:
        packed.writestr("events.rank-1.jsonl", json.dumps({**EVENTS[0], "rank": 1}) + "\n")
    altered = bytearray(content.getvalue())
    altered[6] |= flags
    altered[altered.find(b"PK\1\2") + 8] |= flags
    before = read(folder)
    (folder / "record.zip").write_bytes(altered)
    assert read(folder) == before


def test_a_large_record_stays_as_it_is(tmp_path: Path) -> None:
    folder = succeeded(tmp_path)
    with rank_file(folder, 0).open("a") as file:
        file.write(" " * (64 << 10))
    compact(DataLayout(tmp_path).job("job_x"), 1)
    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", "events.rank-0.jsonl"]
