"""A part that ends during the start of the local service: its own failure ends the start, another part's does not."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from local_service import belonging_to

from service.jobs.settings import Settings
from trivet.child_process import ChildProcess, ServiceTimes
from trivet.cli.context import fails_well
from trivet.errors import Unreachable
from trivet.local import LocalService, StartError


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[LocalService]:
    """A service in its start, whose API has just exited with code 2, as it does without a broker."""
    service = LocalService(Settings(data=tmp_path / "data"))
    api = ChildProcess("API", ["-c", "raise SystemExit(2)"], os.environ, tmp_path / "logs" / "api.log")
    service.parts["API"] = api
    assert api.process.wait() == 2
    yield service
    api.end()


def test_an_api_that_exits_by_itself_ends_the_start(starting: LocalService) -> None:
    with pytest.raises(StartError, match="the API ended with exit code 2"):
        starting._alive()


def test_an_api_that_exits_since_the_broker_was_killed_is_restarted(
    starting: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet.local.free_bytes", lambda _: 4096)
    first = starting.parts["API"].process.pid
    starting.said.append("the broker was ended by SIGKILL and is restarted; its log is …")
    assert starting._alive()
    assert starting.said[1].startswith("the API ended with exit code 2 and is restarted")
    assert starting.said[1].endswith("on a disk of which 4096 bytes are free")
    assert starting.parts["API"].process.pid != first


def test_a_part_that_does_not_start_again_in_a_roll_is_left_to_what_revives_it(
    starting: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = starting.parts["API"]
    starting.api = SimpleNamespace(roll=lambda _: [], processes=[])  # type: ignore[assignment]
    starting.restarts["API"].due_at = time.monotonic() + 3600  # it is awaited since an end before the roll

    def fail() -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(part, "start", fail)
        assert starting.roll() == ["the API does not start: no space left"]
    (told,) = starting.revive()
    assert told.startswith("the API ended with exit code 2 and is restarted in 1 s")
    starting.api = None


@pytest.mark.parametrize("part", ["valkey-server", "workers"])
def test_a_signal_while_a_part_is_started_leaves_no_part_behind(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes once the process is there and before anything knows of it."""
    popen = subprocess.Popen

    def interrupted(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = popen(command, **options)
        if part in (command[-1], Path(command[0]).name):
            started.append(process)
            raise KeyboardInterrupt
        return process

    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), LocalService(Settings(data=tmp_path / "data", port=0)):
        pass
    assert len(started) == 1
    started[0].wait(300)
    assert belonging_to(tmp_path / "data") == []


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def test_a_service_is_ready_whatever_name_its_certificate_has(tmp_path: Path) -> None:
    """Its own socket answers; nobody could at this address."""
    service = LocalService(Settings(data=tmp_path), ServiceTimes(ready_within_s=9), url="https://0.0.0.0:1")
    with UnixStreamServer(str(tmp_path / "api.sock"), Ready) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        with pytest.raises(StartError, match="there is no key"):
            service._wait_until_ready()
        server.shutdown()


def test_a_certificate_that_is_not_trusted_is_told_with_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    def call() -> None:
        raise Unreachable("https://here", "CERTIFICATE_VERIFY_FAILED", passes=False)

    with pytest.raises(typer.Exit):
        fails_well(call)()
    assert "set TRIVET_CA_CERT to its certificate" in capsys.readouterr().err
