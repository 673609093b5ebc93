"""Locks that outlive their taker in its children, and when a part is started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from lanes import slow_but_for

from service.jobs.host import LockedError, ProcessLock, end_processes, holders, take_over
from trivet.child_process import Restarts, ServiceTimes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "lock"


def test_a_lock_is_held_by_a_child_that_inherits_it(path: Path) -> None:
    lock = ProcessLock(path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.fileno(),))
    lock.close()
    lock.close()
    with pytest.raises(LockedError, match="lock"):
        ProcessLock(path)
    assert [process.pid for process in holders(path)] == [child.pid]
    child.kill()
    child.wait()
    ProcessLock(path).close()


@pytest.mark.parametrize("state", slow_but_for(["running", "stopped", "deaf"], "deaf"))
def test_a_lock_is_taken_over_from_whatever_holds_it(path: Path, state: str) -> None:
    lock = ProcessLock(path)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if state == "deaf" else ""
    child = subprocess.Popen(
        [sys.executable, "-c", f"{deaf}print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(lock.fileno(),),
    )
    lock.close()
    assert child.stdout is not None
    child.stdout.readline()
    if state == "stopped":
        psutil.Process(child.pid).suspend()
    take_over(path, 2.0).close()
    assert not psutil.pid_exists(child.pid)


def test_a_process_that_is_gone_already_is_no_error() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(child.pid)
    child.wait()
    end_processes([process], 1.0)


def test_what_ends_after_a_quiet_time_is_started_at_once_and_what_keeps_ending_ever_later() -> None:
    restarts, now, pauses = Restarts(), 0.0, []
    for _ in range(8):
        assert restarts.ended(now)
        assert not restarts.ended(now)
        pauses.append(restarts.pause_s)
        assert restarts.is_due(now) == (restarts.pause_s == 0)
        now += restarts.pause_s
        assert restarts.is_due(now)
        restarts.started(now)
        assert not restarts.is_due(now)
        now += ServiceTimes.settled_s / 2
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]
    assert restarts.ended(now + ServiceTimes.settled_s)
    assert restarts.pause_s == 0
