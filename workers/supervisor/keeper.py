"""Keeps a process group from outliving its supervisor.

Run as a plain script (``python -I -S keeper.py LIFE_FD COMMAND…``, or ``LIFE_FD --child PID`` in the place of a
process that has started the command already), with nothing but the standard library, so that it starts in milliseconds.
It becomes the *subreaper* of everything that the command starts, daemons and processes in sessions of their own
included, and ends all of it

* when the pipe ``LIFE_FD`` reaches its end: the supervisor closed it, or died, however it died;
* at the time that the supervisor last wrote to the pipe, as a line: seconds since the host booted;
* on SIGTERM;
* when the command itself has ended.

The kernel watches that time. It wakes the keeper, and kills it if it is stopped; then its command, and every
process below it, dies with it. So the group ends even if neither its supervisor nor its keeper runs.

It exits last, with the command's exit code (128 + n when signal n ended it), so whoever waits for the keeper knows
that no process is left. After SIGTERM, or at its time, it ends by that signal itself: the command was not at fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

CHILD = "--child"
_PR_SET_CHILD_SUBREAPER = 36
_CLOCK_BOOTTIME = 7
_TIMER_ABSTIME = 1
_KILL_AFTER_S = 0.5
"""Seconds between the end of the lease and SIGKILL, in which the keeper must begin to end its group."""


def main(arguments: list[str]) -> int:
    life, command = int(arguments[0]), arguments[1:]
    os.set_inheritable(life, False)
    become_subreaper()
    wake = _wake_on_signals()
    deadline = _Deadline()
    if command[0] == CHILD:
        child = int(command[1])
    else:
        child = os.posix_spawn(command[0], command, os.environ, setsigdef=[signal.SIGCHLD, signal.SIGTERM])
    try:
        status = _watch(life, wake, child, deadline)
        was_terminated = False
    except _SigtermReceived:
        status, was_terminated = None, True
    deadline.clear()
    end_descendants()
    ended = _reap(child)
    if was_terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    status = ended if status is None else status
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


class _SigtermReceived(Exception):  # noqa: N818
    """SIGTERM came to this process."""


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec`` of a timer that fires once."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "s", "ns")]


class _SignalEvent(ctypes.Structure):
    """``struct sigevent`` that asks for a signal."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * 48),
    ]


class _Deadline:
    """Kernel timers that end this process: SIGTERM at a time, SIGKILL a little later.

    They fire even in a stopped process, and run while the host is suspended.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timers = [(self._timer(signal.SIGTERM), 0.0), (self._timer(signal.SIGKILL), _KILL_AFTER_S)]

    def set(self, until: float) -> None:
        """Let this process live until ``until``, in seconds since the host booted."""
        for timer, later in self._timers:
            self._arm(timer, until + later)

    def clear(self) -> None:
        """Let this process live on."""
        for timer, _ in self._timers:
            self._arm(timer, 0.0)

    def _arm(self, timer: ctypes.c_void_p, when: float) -> None:
        seconds, rest = divmod(when, 1.0)
        once = _TimerSpec(0, 0, int(seconds), int(rest * 1e9))
        self._check_result(self._libc.timer_settime(timer, _TIMER_ABSTIME, ctypes.byref(once), None))

    def _timer(self, number: int) -> ctypes.c_void_p:
        event, timer = _SignalEvent(None, number, 0, b""), ctypes.c_void_p()
        self._check_result(self._libc.timer_create(_CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(timer)))
        return timer

    def _check_result(self, result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), "a timer on CLOCK_BOOTTIME failed")


def descendants(root: int) -> list[int]:
    """Return the pids of all live processes below ``root``; zombies that only wait to be reaped are left out."""
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
    """Adopt this process's orphaned descendants, which would go to init otherwise."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _wake_on_signals() -> int:
    """Return a descriptor that receives the number of each signal, so that none is lost between two waits."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return reader


def _watch(life: int, wake: int, child: int, deadline: _Deadline) -> int | None:
    """Wait until the command or the supervisor ends; return the command's wait status if it was the command.

    Raises :class:`_SigtermReceived`.
    """
    if (status := _reap(child)) is not None:  # before this process learned of the ends of children
        return status
    while True:
        ready, _, _ = select.select([life, wake], [], [])
        if wake in ready:
            numbers = os.read(wake, 512)
            if (status := _reap(child)) is not None:
                return status
            if signal.SIGTERM in numbers:
                raise _SigtermReceived
        if life in ready:
            text = os.read(life, 1 << 16)
            if not text:
                return None
            if newest := text.rpartition(b"\n")[0].rpartition(b"\n")[2]:
                deadline.set(float(newest))


def _reap(child: int) -> int | None:
    """Collect every ended child; return the command's status if it is among them."""
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
    """Kill all processes below this one until none is left: one may start another while it is being killed.

    A subreaper without children has no descendants left, so no process has to be examined.
    """
    pause = 0.001
    while _has_children() and (left := descendants(os.getpid())):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _has_children() -> bool:
    """Return whether there is a child, including a zombie: each orphan's parent is its subreaper."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
