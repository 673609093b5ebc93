"""Identifies and ends processes, also the holders of a lock: one that outlives its parent is found again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from service.jobs.host.process_lock import LockedError, ProcessLock
from service.linux import stat_of

_PAUSE_S = 0.05


@dataclass(frozen=True)
class Process:
    """A process by pid and start time, so that a reused pid is not mistaken for it."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the live process with this pid, if any; a zombie is not alive."""
        try:
            fields = stat_of(pid)
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else cls(pid, fields[19])

    @property
    def alive(self) -> bool:
        return Process.of(self.pid) == self


def send_to_each(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those processes that still live."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def end_tree(pid: int) -> None:
    """End all processes below this one, and this one last: until then they may start others, but lose no parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        while below := [each for each in root.children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]:
            send_to_each(below, signal.SIGKILL)
            psutil.wait_procs(below, timeout=_PAUSE_S)
        root.kill()


def wait_or_kill(process: subprocess.Popen[bytes], within_s: float) -> None:
    """Wait for the end of a child that was asked to end; kill it after ``within_s`` seconds."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def holders(path: Path) -> list[psutil.Process]:
    """Return the processes of this user that have the file of a :class:`ProcessLock` open; none if the lock is free."""
    if not path.exists():
        return []
    with contextlib.suppress(LockedError):
        ProcessLock(path).close()
        return []
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(file.path == str(path.resolve()) for file in process.open_files()):
                found.append(process)
    return found


def take_over(path: Path, within_s: float) -> ProcessLock:
    """Take a lock after ending the processes that hold it, politely for ``within_s`` seconds."""
    while True:
        with contextlib.suppress(LockedError):
            return ProcessLock(path)
        end_processes(holders(path), within_s)


def born_with(variables: Mapping[str, str]) -> list[psutil.Process]:
    """Return the live processes that were started with these environment variables, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and variables.items() <= process.environ().items():
                found.append(process)
    return found


def end_processes(processes: Iterable[psutil.Process], within_s: float) -> None:
    """Send SIGTERM, even to stopped processes, and SIGKILL to those that still live after ``within_s`` seconds."""
    alive = list(processes)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
            process.resume()
    _, alive = psutil.wait_procs(alive, timeout=within_s)
    send_to_each(alive, signal.SIGKILL)
    psutil.wait_procs(alive)
