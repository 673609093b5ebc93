"""The keeper alone: whatever its command starts ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import LIMIT_S, eventually
from worker_fleet import all_gone, is_called

from workers.supervisor import keeper

DAEMON = "setsid sleep 3600 & setsid setsid sleep 3601 & trap '' TERM; "


class Kept:
    """A keeper with a shell behind it, and the pipe that keeps both alive."""

    def __init__(self, script: str) -> None:
        reader, self.life = os.pipe()
        command = [sys.executable, "-I", "-S", keeper.__file__, str(reader), "/bin/bash", "-c", script]
        self.process = subprocess.Popen(command, pass_fds=(reader,))
        os.close(reader)

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def kept() -> Iterator[list[Kept]]:
    started: list[Kept] = []
    yield started
    for each in started:
        each.process.kill()
        each.process.wait()


def start(kept: list[Kept], script: str, sleepers: int) -> tuple[Kept, list[psutil.Process]]:
    each = Kept(script)
    kept.append(each)
    eventually(lambda: sum(is_called(process, "sleep") for process in each.below()) >= sleepers)
    return each, each.below()


def test_the_end_of_the_pipe_ends_daemons_too(kept: list[Kept]) -> None:
    each, below = start(kept, DAEMON + "wait", 2)
    os.close(each.life)
    assert each.process.wait(LIMIT_S) == 128 + signal.SIGKILL
    assert all_gone(below)


def test_sigterm_ends_everything(kept: list[Kept]) -> None:
    each, below = start(kept, DAEMON + "wait", 2)
    each.process.terminate()
    assert each.process.wait(LIMIT_S) == -signal.SIGTERM, "so that nobody takes the command for what ended"
    assert all_gone(below)
    os.close(each.life)


def test_the_end_of_the_command_ends_what_it_left(kept: list[Kept], tmp_path: Path) -> None:
    each, below = start(kept, DAEMON + f"until [ -e {tmp_path}/go ]; do sleep 0.02; done; exit 7", 2)
    (tmp_path / "go").touch()
    assert each.process.wait(LIMIT_S) == 7
    assert all_gone(below)
    os.close(each.life)


def test_processes_that_keep_starting_others_do_not_get_away(kept: list[Kept]) -> None:
    each, _ = start(kept, "spawn() { while true; do setsid sleep 3602 & sleep 0.01; done; }; spawn & spawn & wait", 3)
    os.close(each.life)
    each.process.wait(LIMIT_S)
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "3602"]]


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_commands(kept: list[Kept], code: int) -> None:
    each = Kept(f"exit {code}")
    kept.append(each)
    assert each.process.wait(LIMIT_S) == code
    os.close(each.life)


@pytest.mark.parametrize("when", ["before", "later"])
def test_a_command_that_was_started_already_is_kept_even_when_it_has_ended_before(kept: list[Kept], when: str) -> None:
    each = Kept.__new__(Kept)
    reader, each.life = os.pipe()
    pause = 0.3 if when == "later" else 0
    code = f"""
import os, sys, time
child = os.fork()
if child == 0:
    time.sleep({pause})
    os._exit(7)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT) if {pause == 0} else None
keeper, life = sys.argv[1:]
os.execv(sys.executable, [sys.executable, "-I", "-S", keeper, life, "--child", str(child)])
"""
    command = [sys.executable, "-I", "-S", "-c", code, keeper.__file__, str(reader)]
    each.process = subprocess.Popen(command, pass_fds=(reader,))
    kept.append(each)
    os.close(reader)
    assert each.process.wait(LIMIT_S) == 7
    os.close(each.life)
