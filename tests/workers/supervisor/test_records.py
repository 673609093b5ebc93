"""What supervisors leave on disk and in the manifest."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.events import OddWord, log_file, newest_logged, recorded
from service.jobs.files import JobPaths, UnsafePathError, atomic_write
from service.jobs.host import Process, SupervisorRegistry, supervisor_registry
from service.jobs.records import AttemptRef
from service.linux import uptime
from workers.supervisor import attempt_folder
from workers.supervisor.attempt_folder import open_attempt, read_result
from workers.supervisor.logs import GrowingFile, RankLog
from workers.supervisor.publisher import FOLDER, UnusableArtifact, publish

REF = AttemptRef("job_1", 1, "alpha")


def test_files_are_hashed_and_folders_measured(paths: JobPaths) -> None:
    (paths.artifacts / "a.bin").write_bytes(b"x" * 100_000)
    file = publish(paths, "a.bin", "application/x")
    assert (file.bytes, file.sha256) == (100_000, hashlib.sha256(b"x" * 100_000).hexdigest())
    (paths.artifacts / "a.bin").write_bytes(b"y")
    assert (paths.published / file.sha256).read_bytes() == b"x" * 100_000
    (paths.checkpoints / "step_1" / "deep").mkdir(parents=True)
    (paths.checkpoints / "step_1" / "deep" / "w").write_bytes(b"123")
    folder = publish(paths, "checkpoints/step_1", "application/x")
    assert (folder.bytes, folder.sha256, folder.media_type) == (3, "", FOLDER)


@pytest.mark.parametrize("name", ["missing", "../outside", "/etc/passwd", "link", ".", ""])
def test_what_is_missing_or_elsewhere_is_no_artifact(paths: JobPaths, name: str) -> None:
    (paths.root.parent / "outside").write_text("secret")
    (paths.artifacts / "link").symlink_to("/etc/passwd")
    with pytest.raises(UnusableArtifact):
        publish(paths, name, "text/plain")


def test_pipes_and_what_grows_meanwhile_are_no_artifacts(paths: JobPaths) -> None:
    os.mkfifo(paths.artifacts / "pipe")
    with pytest.raises(UnusableArtifact, match="no regular file"):
        publish(paths, "pipe", "text/plain")
    (paths.artifacts / "large").write_bytes(b"x" * 100)

    def append() -> bool:
        with (paths.artifacts / "large").open("ab") as file:
            file.write(b"x")
        return False

    with pytest.raises(UnusableArtifact, match="was written to"):
        publish(paths, "large", "text/plain", copied_bytes=10, is_over=append)
    with pytest.raises(UnusableArtifact, match="the attempt ended before"):
        publish(paths, "large", "text/plain", is_over=lambda: True)
    assert list(paths.published.iterdir()) == []


@pytest.mark.parametrize(
    "taken", ["published", "artifacts", "checkpoints", "attempts", "attempts/2", "attempts/2/work"]
)
def test_no_attempt_begins_in_a_folder_that_a_link_leads_to(paths: JobPaths, tmp_path: Path, taken: str) -> None:
    (tmp_path / "theirs").mkdir()
    place = paths.root / taken
    if place.exists():
        place.rename(tmp_path / "aside")
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(tmp_path / "theirs")
    with pytest.raises(UnsafePathError, match=rf"a link.*{taken}"):
        open_attempt(paths, 2)
    assert list((tmp_path / "theirs").iterdir()) == []


@pytest.mark.parametrize("lay", ["link", "pipe", "second name"])
def test_what_is_logged_goes_into_files_of_the_supervisors_own(tmp_path: Path, lay: str) -> None:
    """One that is there already is taken up; something else in its place, before or meanwhile, is not."""
    theirs, path = tmp_path / "theirs", tmp_path / "log.rank-0.jsonl"
    theirs.write_text("# a shell's\n")
    act = {"link": path.symlink_to, "second name": path.hardlink_to}.get(lay, lambda _: os.mkfifo(path))
    growing = GrowingFile(path)
    growing.add(b"one\n")
    growing.write()
    path.rename(tmp_path / "moved")
    act(theirs)
    growing.add(b"two\n")
    growing.write()
    assert (tmp_path / "moved").read_bytes() == b"one\ntwo\n"
    fresh = GrowingFile(path)
    fresh.add(b"touch /tmp/theirs\n")
    with pytest.raises(OSError, match=r"log\.rank-0"):
        fresh.write()
    assert theirs.read_text() == "# a shell's\n"


@pytest.mark.parametrize("left", ["link", "pipe", "folder", "no JSON", "a list", "too deep", "too much"])
def test_what_is_no_result_is_refused_with_the_reason(
    paths: JobPaths, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setattr(attempt_folder, "LARGEST_RESULT", 500)
    open_attempt(paths, 1).close()
    assert read_result(paths.work(1)) is None
    result = paths.work(1) / "result.json"
    (paths.root.parent / "theirs.json").write_text('{"token": 1}')
    lay: dict[str, Callable[[], object]] = {
        "link": lambda: result.symlink_to(paths.root.parent / "theirs.json"),
        "pipe": lambda: os.mkfifo(result),
        "folder": result.mkdir,
        "no JSON": lambda: result.write_text("{"),
        "a list": lambda: result.write_text("[1]"),
        "too deep": lambda: result.write_text('{"a":' * 70 + "1" + "}" * 70),
        "too much": lambda: result.write_text(json.dumps({"x": "x" * 600})),
    }
    lay[left]()
    with pytest.raises(OddWord):
        read_result(paths.work(1))
    result.rename(result.with_name("aside"))
    result.write_text('{"loss": 1}')
    assert read_result(paths.work(1)) == {"loss": 1}


def test_an_entry_of_the_registry_lasts_as_long_as_its_block(tmp_path: Path) -> None:
    registry = SupervisorRegistry(tmp_path / "host")
    with registry.entered(REF, os.getpid(), tmp_path / "scratch") as entered:
        assert entered
        assert registry.live() == ("job_1:1",)
        with registry.entered(REF, os.getpid(), tmp_path / "other") as again:
            assert not again
        assert registry.live() == ("job_1:1",)
    assert registry.live() == ()


def test_of_two_supervisors_at_once_one_is_entered_and_stays_when_the_other_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_slowly(path: Path, content: bytes) -> None:
        time.sleep(0.1)
        atomic_write(path, content)

    monkeypatch.setattr(supervisor_registry, "atomic_write", write_slowly)
    registry = SupervisorRegistry(tmp_path)
    both, seen = threading.Barrier(2, timeout=10), list[tuple[bool, tuple[str, ...]]]()

    def enter() -> None:
        with registry.entered(REF, os.getpid(), tmp_path / "scratch") as entered:
            both.wait()
            if entered:
                both.wait()
                seen.append((entered, registry.live()))
        if not entered:
            both.wait()

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(True, ("job_1:1",))]


def test_a_supervisor_that_reports_its_end_is_spared_unless_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    registry = SupervisorRegistry(tmp_path)
    with registry.entered(REF, os.getpid(), tmp_path / "scratch"):
        registry.note_report(REF)
        registry.kill(REF)
        assert (registry.live(), killed) == (("job_1:1",), [])
        monkeypatch.setattr(supervisor_registry, "uptime", lambda: uptime() + 3600)
        registry.kill(REF)
        assert killed == [os.getpid()]


def test_an_entry_of_the_dead_is_cleared_with_its_scratch(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    dead = {"pid": os.getpid(), "started": "1"}
    entry = {"name": "job_1:1", "supervisor": dead, "keeper": dead, "scratch": str(scratch)}
    (tmp_path / "job_1.1.json").write_text(json.dumps(entry))
    assert SupervisorRegistry(tmp_path).live() == ()
    assert not scratch.exists()
    assert not (tmp_path / "job_1.1.json").exists()


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b'{"name": "job_1:1"}', b"[]", b'{"name": 1, "supervisor": 2}'])
def test_a_torn_entry_is_set_aside_and_harms_nobody(tmp_path: Path, text: bytes) -> None:
    torn = tmp_path / "job_1.1.json"
    torn.write_bytes(text)
    registry = SupervisorRegistry(tmp_path)
    assert registry.live() == ()
    assert not torn.exists()
    assert torn.with_name("job_1.1.json.unreadable").read_bytes() == text
    with registry.entered(REF, os.getpid(), tmp_path / "scratch") as entered:
        assert entered
        assert registry.live() == ("job_1:1",)


def test_an_entry_lives_while_its_keeper_does(tmp_path: Path) -> None:
    keeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alive = Process.of(keeper.pid)
    assert alive is not None
    entry = {
        "name": "job_1:1",
        "supervisor": {"pid": os.getpid(), "started": "1"},
        "keeper": {"pid": alive.pid, "started": alive.started},
        "scratch": str(tmp_path / "scratch"),
    }
    (tmp_path / "job_1.1.json").write_text(json.dumps(entry))
    assert SupervisorRegistry(tmp_path).live() == ("job_1:1",)
    keeper.kill()
    keeper.wait()
    assert SupervisorRegistry(tmp_path).live() == ()


@given(lengths=st.lists(st.integers(0, 300), max_size=120), most=st.integers(2000, 6000), chunk=st.integers(1, 40))
def test_a_log_keeps_its_beginning_and_its_newest_lines_within_its_size(
    lengths: list[int], most: int, chunk: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = RankLog(folder, 0, most_bytes=most)
        told = [f"{number} {'x' * length}" for number, length in enumerate(lengths)]
        for number, text in enumerate(told):
            log.add(text, "stdout")
            if number % chunk == 0:
                log.file.write()
        log.file.write()
        longest = max((path.stat().st_size for path in folder.iterdir()), default=0)
        assert sum(path.stat().st_size for path in folder.iterdir()) <= most + 8 * longest
        found = list(recorded(folder, {"log"}))
        backwards = [event["line"] for event in newest_logged(folder)][::-1]
        assert backwards == [event["line"] for event in found if event["stream"] == "stdout"]
    kept = [told.index(event["line"]) for event in found if event["stream"] == "stdout"]
    gaps = [int(event["line"][1:].split()[0]) for event in found if event["stream"] == "service"]
    assert kept == sorted(kept)
    assert len(kept) + sum(gaps) == len(told)
    assert len(gaps) <= 1
    assert not told or (kept[0], kept[-1]) == (0, len(told) - 1)


def test_lines_of_several_ranks_come_by_their_time(tmp_path: Path) -> None:
    logs = [RankLog(tmp_path, rank) for rank in (0, 1)]
    for number in range(6):
        logs[number % 2].add(str(number), "stderr")
    for log in logs:
        log.file.write()
    with log_file(tmp_path, 1).open("ab") as file:
        file.write(b'{"type": "log", "line": "torn')
    assert [(event["rank"], event["line"]) for event in recorded(tmp_path, {"log"})] == [
        (number % 2, str(number)) for number in range(6)
    ]
    assert [event["line"] for event in newest_logged(tmp_path)] == ["5", "4", "3", "2", "1", "0"]


def test_held_back_lines_are_counted(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0, rate=0, burst=2)
    relayed = [event["line"] for number in range(5) for event in log.add(str(number), "stdout")]
    assert relayed == ["0", "1"]
    (notice,) = log.close()
    assert notice["line"] == "[3 lines were not relayed: too many at once; the job's log has them]"
    assert notice["live"]
    assert list(log.tail) == ["0", "1", "2", "3", "4"]
