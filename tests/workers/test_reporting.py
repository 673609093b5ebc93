"""The rank's side of the event socket."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.jobs import reporting
from service.jobs.layout import JobPaths
from service.jobs.reporting import SocketReporter


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    paths = JobPaths(tmp_path / "job")
    paths.artifacts.mkdir(parents=True)
    return paths


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def received(theirs: socket.socket) -> list[dict[str, Any]]:
    with theirs.makefile("rb") as stream:
        return [json.loads(line) for line in stream]


def test_events_arrive_in_order_and_whole(ends: tuple[socket.socket, socket.socket], paths: JobPaths) -> None:
    report = SocketReporter(ends[0], 3, paths)
    for step in range(2000):
        report.metric(step, {"loss": np.float32(0.5)})  # type: ignore[dict-item]
    report.bound({"instance": 1, "verdict": "verified", "lower": np.zeros(2)})
    report.progress(1, 2, "steps", share=0.75, left_s=3.0)
    report.span("forward", 1.0, 2.0, {"micro_batch": 0})
    (paths.artifacts / "plots").mkdir()
    report.artifact(paths.artifacts / "plots")
    report.artifact(paths.checkpoints / "step_1")
    collected: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: collected.extend(received(ends[1])))
    reader.start()
    report.close(done=True)
    reader.join(10)
    assert [event["step"] for event in collected[:2000]] == list(range(2000))
    assert {event["rank"] for event in collected} == {3}
    rest = collected[2000:]
    assert [event["type"] for event in rest] == ["bound", "progress", "span", "artifact", "artifact", "done"]
    assert [event["name"] for event in rest[3:5]] == ["plots", "checkpoints/step_1"]
    assert rest[0]["lower"] == [0.0, 0.0]
    assert rest[1].items() >= {"done": 1, "share": 0.75, "left_s": 3.0}.items()
    assert "phase" not in rest[1]


def test_nobody_listening_is_no_error(ends: tuple[socket.socket, socket.socket], paths: JobPaths) -> None:
    report = SocketReporter(ends[0], 0, paths)
    ends[1].close()
    for step in range(100):
        report.metric(step, {"loss": 1.0})
    report.close(done=True)
    report.metric(101, {"loss": 1.0})


def test_a_listener_that_does_not_read_costs_metrics_but_no_results(
    ends: tuple[socket.socket, socket.socket], paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_CAPACITY", 50)
    report = SocketReporter(ends[0], 0, paths)
    for step in range(20_000):
        report.metric(step, {"loss": 1.0})
    report.bound({"instance": 7, "verdict": "verified"})
    collected: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: collected.extend(received(ends[1])))
    reader.start()
    report.close(done=True)
    reader.join(10)
    types = [event["type"] for event in collected]
    assert types.count("bound") == 1
    assert types.count("metric") < 20_000
    dropped = sum(int(event["line"].split()[0]) for event in collected if event["type"] == "log")
    assert types.count("metric") + dropped == 20_000


def test_only_files_of_the_job_can_be_announced(ends: tuple[socket.socket, socket.socket], paths: JobPaths) -> None:
    report = SocketReporter(ends[0], 0, paths)
    with pytest.raises(ValueError, match="only files below the job's folder"):
        report.artifact(Path("/etc/passwd"))
    report.close(done=False)
