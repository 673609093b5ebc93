"""Provides calls of Linux that Python lacks: the clock of leases, ``prctl``, the command line that a process shows,
what it has open, its signals and its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOM = {"TRIVET_ROOM": 16_384 * "."}
"""Environment for a process whose forks will show another environment: :func:`present_as`."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_MADV_COLLAPSE, _LARGE_PAGE = 25, 1 << 21
_ARGUMENTS, _ENVIRONMENT = slice(45, 47), slice(47, 49)
"""Where ``/proc/self/stat`` says, behind the name, at which addresses the two begin and end."""


def stat_of(pid: int | str) -> list[str]:
    """Return the fields of a process, or of ``PID/task/TID``, that ``/proc`` gives behind its name, from its state on;
    "self" is this one. Raises ``FileNotFoundError`` or ``ProcessLookupError`` if it has ended.

    The kernel cuts names at 15 bytes, which may be within a letter.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def uptime() -> float:
    """Return the seconds since the host booted, including suspension; the same for all its processes.

    Nobody sets this clock, so leases use it.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends; end now if that has already happened. A fork
    names its ``parent``, which may have ended before this call.
    """
    parent = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def weigh_session(pid: int) -> bool:
    """Give the session of a process the weight of its niceness: where the kernel divides the cores among sessions
    (autogroup), niceness by itself only counts within each. Return false if the kernel wants to be asked again later:
    from all users but root together it takes ten such orders a second.
    """
    try:
        if (niceness := os.getpriority(os.PRIO_PROCESS, pid)) > 0:
            Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
    except BlockingIOError:
        return False
    except OSError:
        pass  # the kernel has no such groups, or the process has ended
    return True


def forbid_new_privileges() -> None:
    """Let no program that the calling thread starts gain privileges. Raises :class:`OSError`."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")


def use_large_pages() -> int:
    """Move this process's private memory into large pages, so that a fork copies five hundred times fewer entries, and
    return how many there are now. A page that a fork writes to is copied as a small one.

    Needs Linux 6.1. If the kernel refuses, for example for lack of memory, forks only cost more.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    done = 0
    for start, end in _private_memory():
        for address in range(-(-start // _LARGE_PAGE) * _LARGE_PAGE, end - _LARGE_PAGE + 1, _LARGE_PAGE):
            where, size = ctypes.c_void_p(address), ctypes.c_size_t(_LARGE_PAGE)
            done += libc.madvise(where, size, _MADV_COLLAPSE) == 0
    return done


def _private_memory() -> Iterator[tuple[int, int]]:
    """Yield the address ranges of this process's anonymous memory."""
    for line in Path("/proc/self/maps").read_bytes().rstrip().split(b"\n"):  # names of files may be any bytes
        where, rights, _, _, _, *name = line.split()
        if rights == b"rw-p" and name in ([], [b"[heap]"]):
            start, _, end = where.partition(b"-")
            yield int(start, 16), int(end, 16)


def open_files() -> list[str]:
    """Return the names of what this process has open. Raises :class:`OSError` if the kernel does not say."""
    found = []
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names alone, before one of them is gone
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{entry}"))  # noqa: PTH115 - a name, not a path to follow
    return found


def signal_name(number: int) -> str:
    """Return a signal's name, or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def handle_signals(handle: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """Let a function handle these signals meanwhile."""
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def leave(code: int) -> NoReturn:
    """End this process at once, without exit handlers and finalisation, once its output is written."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def present_as(arguments: Iterable[str], environment: Mapping[str, str]) -> None:
    """Let ``/proc``, and so ``ps``, show this command line and this environment, as far as there is room for them.

    Otherwise a fork shows those of its parent. Nothing may point into the old environment any more; Python's
    ``os.environ`` does not once it was cleared and filled again.
    """
    fields = stat_of("self")
    _overwrite(fields[_ARGUMENTS], arguments)
    _overwrite(fields[_ENVIRONMENT], (f"{name}={value}" for name, value in environment.items()))


def _overwrite(addresses: list[str], words: Iterable[str]) -> None:
    start, end = map(int, addresses)
    text = b""
    for word in words:
        if len(text) + len(entry := os.fsencode(word) + b"\0") <= end - start:
            text += entry
    if end > start:  # the kernel hides them from an untrusted process
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _prctl(option: int, value: int, name: str) -> None:
    checked(f"prctl({name})", ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0))


def checked(what: str, result: int) -> int:
    """Return the result of a call of the C library. Raises :class:`OSError`, with its errno, if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
