"""The rank's side: events that are on disk, last words over the socket."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import eventually

from service.jobs.events import LONGEST_EVENT, BoundsRow, EventReader, EventWriter, rank_file, recorded
from service.jobs.files import JobPaths, full_disk
from service.jobs.runtime import RankReporter

ROW = BoundsRow(
    instance=7, verdict="verified", lower=[], upper=[], margin=1.0, method="crown", seconds=0.5, domains=1,
    counterexample=None,
)  # fmt: skip


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def on_disk(paths: JobPaths, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rank_file(paths.attempt(1), rank).read_text().splitlines()]


def test_events_are_on_disk_in_order_and_whole(ends: tuple[socket.socket, socket.socket], paths: JobPaths) -> None:
    report = RankReporter(ends[0], 3, paths, 1)
    for step in range(2000):
        report.metric(step, {"loss": np.float32(0.5)})  # type: ignore[dict-item]
    report.bound(replace(ROW, lower=np.zeros(2)))  # type: ignore[arg-type]
    report.progress(1, 2, "steps")
    report.span("forward", 1.0, 2.0, {"micro_batch": 0})
    (paths.artifacts / "plots").mkdir()
    report.artifact(paths.artifacts / "plots")
    report.artifact(paths.checkpoints / "step_1")
    report.log("the end")
    report.done()
    collected = on_disk(paths, 3)
    assert [event["step"] for event in collected[:2000]] == list(range(2000))
    assert {event["rank"] for event in collected} == {3}
    rest = collected[2000:]
    assert [event["type"] for event in rest] == ["bound", "progress", "span", "artifact", "artifact", "log"]
    assert [event["name"] for event in rest[3:5]] == ["plots", "checkpoints/step_1"]
    assert rest[0]["lower"] == [0.0, 0.0]
    assert json.loads(ends[1].recv(4096))["type"] == "done"


def test_phases_are_told_once_by_rank_0_and_the_first_result_ends_what_comes_before_the_work(
    ends: tuple[socket.socket, socket.socket], paths: JobPaths
) -> None:
    for rank in (0, 1):
        report = RankReporter(ends[0], rank, paths, 1)
        for name in ("importing", "loading", "loading", "first step"):
            report.phase(name)
        report.progress(0, 9, "steps")
        for step in (1, 2):
            report.metric(step, {"loss": 1.0})
        report.phase("preparing")
        report.phase("ending")
        report.metric(3, {"eval_loss": 1.0})
        report.done()
    told = [event["name"] for event in on_disk(paths, 0) if event["type"] == "phase"]
    assert told == ["importing", "loading", "first step", "working", "ending"]
    assert {event["type"] for event in on_disk(paths, 1)} == {"metric", "progress"}


@pytest.mark.parametrize(
    "tell",
    [
        lambda report: report.metric(7, {"loss": 1.0}),
        lambda report: report.bound(ROW),
    ],
)
def test_results_are_on_disk_before_the_rank_goes_on(
    ends: tuple[socket.socket, socket.socket], paths: JobPaths, tell: Callable[[RankReporter], None]
) -> None:
    report = RankReporter(ends[0], 0, paths, 1)
    report.span("forward", 1.0, 2.0)
    tell(report)
    assert len(on_disk(paths, 0)) == 2


def test_of_an_event_that_no_reader_takes_the_log_tells(
    ends: tuple[socket.socket, socket.socket], paths: JobPaths
) -> None:
    report = RankReporter(ends[0], 0, paths, 1)
    report.put({"type": "bound", "instance": 1, "verdict": "x" * LONGEST_EVENT})
    report.flush()
    (line,) = rank_file(paths.attempt(1), 0).read_bytes().splitlines()
    assert "a bound event of" in json.loads(line)["line"]


def test_what_is_no_result_follows_soon(ends: tuple[socket.socket, socket.socket], paths: JobPaths) -> None:
    report = RankReporter(ends[0], 0, paths, 1)
    report.progress(1, 2, "steps")
    eventually(lambda: on_disk(paths, 0))


def test_nobody_listening_is_no_error(ends: tuple[socket.socket, socket.socket], paths: JobPaths) -> None:
    report = RankReporter(ends[0], 0, paths, 1)
    ends[1].close()
    for step in range(100):
        report.metric(step, {"loss": 1.0})
    report.done()
    assert len(on_disk(paths, 0)) == 100


def test_only_files_of_the_job_can_be_announced(ends: tuple[socket.socket, socket.socket], paths: JobPaths) -> None:
    report = RankReporter(ends[0], 0, paths, 1)
    with pytest.raises(ValueError, match="only files below the job's folder"):
        report.artifact(Path("/etc/passwd"))


def test_a_full_disk_is_an_error_that_says_so(paths: JobPaths) -> None:
    rank_file(paths.attempt(1), 0).symlink_to("/dev/full")
    writer = EventWriter(rank_file(paths.attempt(1), 0))
    with pytest.raises(OSError, match="No space left") as caught:
        writer.append(b"{}\n", counts=True)
    said = full_disk(caught.value, paths.root)
    assert said is not None
    assert str(rank_file(paths.attempt(1), 0)) in said
    assert said.endswith("bytes are free")
    with pytest.raises(OSError, match="No space left"):
        writer.append(b"{}\n", counts=False)
    assert full_disk(ValueError("no"), paths.root) is None
    wrapped = RuntimeError("could not save")
    wrapped.__cause__ = caught.value
    assert full_disk(wrapped, paths.root) == said


def test_a_reader_follows_a_file_line_by_line(tmp_path: Path) -> None:
    reader = EventReader(tmp_path / "events.rank-0.jsonl", 0)
    assert reader.read() == []
    with (tmp_path / "events.rank-0.jsonl").open("ab", buffering=0) as file:
        file.write(b"one\ntwo\nthr")
        assert reader.read() == [b"one", b"two"]
        assert reader.read() == []
        file.write(b"ee\n")
        assert reader.read() == [b"three"]


def test_a_record_holds_events_only_and_is_never_waited_for(tmp_path: Path) -> None:
    """A rank may leave anything in the place of its file."""
    good = b'{"type":"metric","step":1,"values":{"loss":null},"time":2.0,"rank":9}\n'
    (tmp_path / "events.rank-0.jsonl").write_bytes(b"not json\n" + good + b'{"type":"metric","step":"x"}\n' + good[:9])
    (tmp_path / "events.jsonl").write_bytes(good.replace(b"2.0", b"1.0"))
    os.mkfifo(tmp_path / "events.rank-1.jsonl")
    (tmp_path / "elsewhere").write_bytes(good)
    (tmp_path / "events.rank-2.jsonl").symlink_to(tmp_path / "elsewhere")
    found = list(recorded(tmp_path, {"metric"}))
    assert [(event["time"], event["rank"]) for event in found] == [(1.0, 9), (2.0, 0)]


def test_a_rank_that_is_killed_leaves_every_result_that_it_reported(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path)
    paths.attempt(1).mkdir(parents=True)
    program = f"""
import os, signal, socket
from pathlib import Path
from service.jobs.files import JobPaths
from service.jobs.runtime import RankReporter
report = RankReporter(socket.socketpair()[0], 0, JobPaths(Path({str(tmp_path)!r})), 1)
for step in range(1, 501):
    report.span("step", 0.0, 1.0)
    report.metric(step, {{"loss": 1.0}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert [event["step"] for event in on_disk(paths, 0) if event["type"] == "metric"] == list(range(1, 501))
