"""Provides what Linux offers and Python does not: the clock of leases, and calls of ``prctl``."""

from __future__ import annotations

import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def uptime() -> float:
    """Return seconds since the host booted, those in suspension included; the same for all its processes.

    Nobody sets this clock, so it is the one of leases.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when its parent ends; end now when that already happened."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def forbid_new_privileges() -> None:
    """Let no program that the calling thread starts gain privileges. Raises :class:`OSError`."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")


def _prctl(option: int, value: int, name: str) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({name}) failed")
