"""Keeps a process group from outliving its supervisor.

Run as a plain script (``python -I -S keeper.py LIFE_FD COMMAND…``), with nothing but the standard library, so that
it starts in milliseconds. It becomes the *subreaper* of everything that the command starts, daemons and processes
in sessions of their own included, and ends all of it

* when the pipe ``LIFE_FD`` reaches its end: the supervisor closed it, or died, however it died;
* on SIGTERM;
* when the command itself has ended.

It exits last, with the command's exit code (128 + n when signal n ended it), so whoever waits for the keeper knows
that no process is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    life, command = int(arguments[0]), arguments[1:]
    os.set_inheritable(life, False)
    become_subreaper()
    wake = _wake_on_signals()
    child = os.posix_spawn(command[0], command, os.environ, setsigdef=[signal.SIGCHLD, signal.SIGTERM])
    status = _watch(life, wake, child)
    end_descendants()
    ended = _reap(child)
    status = ended if status is None else status
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def descendants(root: int) -> list[int]:
    """Pids of all live processes below ``root``; zombies that only wait to be reaped are left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - for the same reason as below
        if entry.isdigit() and (parent := _live_parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry))
    found, frontier = [], [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _live_parent(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123 - pathlib would triple the start-up time
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    threads = int(fields[17])
    return None if fields[0] in (b"Z", b"X") and threads <= 1 else int(fields[1])


def become_subreaper() -> None:
    """Adopt the orphans among the descendants of this process, which would be init's otherwise."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _wake_on_signals() -> int:
    """A descriptor on which the number of each signal arrives, so that none is lost between two waits."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return reader


def _watch(life: int, wake: int, child: int) -> int | None:
    """Wait until the command or the supervisor ends; the command's wait status when that is what ended."""
    while True:
        ready, _, _ = select.select([life, wake], [], [])
        if wake in ready:
            numbers = os.read(wake, 512)
            if (status := _reap(child)) is not None:
                return status
            if signal.SIGTERM in numbers:
                return None
        if life in ready and not os.read(life, 512):
            return None


def _reap(child: int) -> int | None:
    """Collect every ended child; the status of the command when it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                found = status
    return found


def end_descendants() -> None:
    """Kill all processes below this one until nothing is left: one may start another while it is being killed."""
    pause = 0.001
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
