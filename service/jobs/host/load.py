"""Says when more threads want to compute on this host than it has cores, and whose they are."""

from __future__ import annotations

import contextlib
import os
from collections import Counter

import psutil

from service.jobs.records import CoreDemand, Overcommitment
from service.linux import stat_of

_PER_CORE = 2.0
"""Threads for each core, over the last minute, beyond which a host is overcommitted."""
_NAMED = 5
"""The most who are named."""
_JOB = "TRIVET_JOB"


def overcommitment() -> Overcommitment | None:
    """Return who wants how many cores, if this machine is overcommitted."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= _PER_CORE * cores:
        return None
    return Overcommitment(load=round(load, 1), cores=cores, by=core_demands())


def core_demands() -> tuple[CoreDemand, ...]:
    """Return who has threads that run or wait for a core at this moment, most first: jobs by their id, others by
    their program and user.
    """
    found: Counter[tuple[str | None, str]] = Counter()
    for process in psutil.process_iter():
        if process.pid != os.getpid() and (threads := _runnable(process.pid)):
            with contextlib.suppress(psutil.Error):
                found[_owner(process)] += threads
    return tuple(CoreDemand(job=job, program=name, threads=count) for (job, name), count in found.most_common(_NAMED))


def _runnable(pid: int) -> int:
    count = 0
    with contextlib.suppress(OSError):  # it has ended
        for task in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                count += stat_of(f"{pid}/task/{task.name}")[0] == "R"
    return count


def _owner(process: psutil.Process) -> tuple[str | None, str]:
    with contextlib.suppress(psutil.AccessDenied, OSError):
        if job := process.environ().get(_JOB):
            return job, ""
    return None, f"{process.name()} of {process.username()}"
