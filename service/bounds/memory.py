"""Plans the memory of bounds: how much is free on a device, how much fits, and smaller steps after a failure.

Free memory is queried when something is planned, and again after a failure, not at every step, since a driver answers
slowly. Another process may take the free memory after the plan, so steps may fail: :func:`in_parts` and
:func:`halving` repeat a step that ran out of memory in smaller parts. Memory of libraries besides the tensors is kept
small.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import psutil
import torch

from service.causes import causes
from service.jobs.runtime import RefusedError

T = TypeVar("T")
GIB = 2**30


class MemoryMeter(Protocol):
    """The memory of a device, in bytes."""

    def used(self, device: torch.device) -> int:
        """Return how much this process uses."""

    def free(self, device: torch.device) -> int:
        """Return how much more this process could take."""


class SystemMeter(MemoryMeter):
    """Asks the driver for a CUDA device, and the system for the host's memory."""

    def used(self, device: torch.device) -> int:
        if device.type == "cuda":
            return int(torch.cuda.memory_allocated(device))
        return int(psutil.Process().memory_info().rss)

    def free(self, device: torch.device) -> int:
        """Return free bytes: of a CUDA device including torch's unused reserve, of the host within control groups and
        limits.
        """
        if device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return int(torch.cuda.mem_get_info(device)[0] + unused)
        return max(0, min(psutil.virtual_memory().available, *_group_rooms(), *_address_rooms()))


SYSTEM = SystemMeter()


@dataclass(frozen=True)
class MemoryBudget:
    """The share of each device's memory that a job may take: at most ``limit`` bytes, and no more than is free.

    On the host, the limit counts the whole process, and a step that is not expected to fit is not tried: the
    system ends a process that takes too much. A CUDA device refuses instead, so a try costs nothing.
    """

    limit: int | None = None
    meter: MemoryMeter = SYSTEM

    def free(self, device: torch.device) -> int:
        """Return the bytes that may be taken now."""
        free = self.meter.free(device)
        if self.limit is not None:
            free = min(free, self.limit - self.meter.used(device))
        return max(0, free)

    def plan(
        self,
        device: torch.device,
        each: int,
        most: int,
        *,
        share: int = 1,
        kept: int = 0,
        least: Callable[[int], int] = lambda count: count,
    ) -> int:
        """Return how many items of ``each`` bytes fit into ``share`` of the free memory at once, from 1 to ``most``.

        ``kept`` of the free bytes are reserved. Ranks that do the same agree by ``least``, which all of them call.
        Raises :class:`MemoryShortageError`, on all of them, if not even one item fits into the host's memory.
        """
        free = self.free(device) - kept
        fits = device.type != "cpu" or each <= free
        count = least(max(1, min(most, free // share // max(1, each))) if fits else 0)
        if not count:
            raise MemoryShortageError(self._amounts(each, free, device))
        return count

    def shortage(self, stage: str, device: torch.device, error: BaseException) -> MemoryShortageError:
        """Return the error to raise for ``error``, for which :func:`is_out_of_memory` holds, while it is being handled.

        The failed step still uses its memory then, which does not count as free.
        """
        if isinstance(error, MemoryShortageError):
            return error if error.stage else MemoryShortageError(error.amounts, stage)
        free, tried = self.free(device), _tried_of(error)
        return MemoryShortageError(self._amounts(tried, free, device), stage)

    def _amounts(self, needed: int | None, free: int, device: torch.device) -> str:
        needs = "more is needed than" if needed is None else f"{_size(needed)} are needed,"
        within = "" if self.limit is None else f" within budget.memory_gib={self.limit / GIB:g}"
        return f"{needs} {_size(free)} are free on {device}{within}"

    @contextmanager
    def enforced(self, device: torch.device) -> Iterator[None]:
        """Let torch refuse allocations beyond the limit on a CUDA device, even if nothing was planned."""
        if self.limit is None or device.type != "cuda":
            yield
            return
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


class MemoryShortageError(RefusedError):
    """Not even the smallest step of ``stage`` fitted: ``amounts`` says how much was needed and how much was free."""

    final = False

    def __init__(self, amounts: str, stage: str = "") -> None:
        super().__init__(f"out of memory{f' in {stage}' if stage else ''}: {amounts}")
        self.amounts, self.stage = amounts, stage


UNLIMITED = MemoryBudget()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error or its cause says that memory ran out: of torch, its libraries, Python or the system."""
    for cause in causes(error, handled=False):
        if isinstance(cause, torch.OutOfMemoryError | MemoryError | MemoryShortageError):
            return True
        if isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in _SIGNS):
            return True
    return False


_SIGNS = ("can't allocate memory", "out of memory", "_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "bad_alloc")
"""Messages of torch's allocator on the host; of the driver and Triton; of CUDA's libraries, whose handles take memory.
"""


def make_room(device: torch.device) -> None:
    """Give back memory that torch holds without using it, since other processes may need it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def halving(size: int, run: Callable[[int], T], device: torch.device, *, alone: bool = True) -> T:
    """Call ``run(size)``, or with half of that as often as memory runs out; raises what happens at a size of 1.

    If other ranks take part, which may have had enough memory, ``alone`` is false and the first failure is
    raised: they wait for the failed step.
    """
    while True:
        try:
            return run(size)
        except Exception as error:
            if not alone or size <= 1 or not is_out_of_memory(error):
                raise
        # Not in the handler: the error's traceback holds what the failed step had.
        size = -(-size // 2)
        make_room(device)


def in_parts(
    total: int, at_once: int, run: Callable[[slice], T], device: torch.device, *, alone: bool = True
) -> list[T]:
    """Call ``run`` for slices of ``range(total)`` with ``at_once`` entries each, fewer once memory runs out,
    like :func:`halving`.
    """
    found: list[T] = []
    done, size = 0, at_once
    while done < total:

        def step(size: int, done: int = done) -> tuple[int, T]:
            return size, run(slice(done, done + size))

        size, result = halving(min(size, total - done), step, device, alone=alone)
        found.append(result)
        done += size
    return found


def _size(count: int) -> str:
    count = max(0, count)
    unit, name = next(((1 << 10 * power, name) for power, name in _UNITS if count >= 1 << 10 * power), (1, "B"))
    value = count / unit
    return f"{value:.0f} {name}" if value >= 100 else f"{value:.3g} {name}"


_UNITS = ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"))
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")


def _tried_of(error: BaseException | None) -> int | None:
    """Return the bytes that an allocator could not give, if its message says so."""
    for cause in causes(error, handled=False):
        if found := _TRIED.search(str(cause)):
            powers = {"bytes": 0, "KiB": 1, "MiB": 2, "GiB": 3}
            return int(float(found[1]) * 1024 ** powers[found[2]])
    return None


def _group_rooms(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return the bytes left in each memory control group of this process, version 2 or 1, innermost first."""
    rooms = []
    for line in _lines(membership):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.strip("/")
        for each in (folder, *folder.parents):
            rooms += _room(each, limit, used)
            if each == base:
                break
    return rooms


def _room(folder: Path, limit: str, used: str) -> list[int]:
    """Return the bytes left in a group; nothing without a limit. Unused pages of files count, since the system
    drops them before it ends a process.
    """
    (most, *_), (now, *_) = _lines(folder / limit) or [""], _lines(folder / used) or [""]
    if not most.isdecimal() or not now.isdecimal():
        return []
    statistics = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    reclaimable = int(statistics.get("total_inactive_file", statistics.get("inactive_file", "0")))
    return [int(most) - int(now) + reclaimable]


def _address_rooms() -> list[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return [] if limit == resource.RLIM_INFINITY else [limit - psutil.Process().memory_info().vms]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
SMALL = ":1024:2"
"""KiB and how often: 2 MiB for each stream."""

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of ``mallopt`` in glibc's ``malloc.h``."""
KEPT, FROM_THE_SYSTEM = 2**27, 2**25
"""Bytes that are kept once they are free, and from which a block is the system's own; glibc takes no more for that."""


def keep_workspaces_small() -> None:
    """Give matrix products 2 MiB for each stream that they run on, instead of 32; before the process's first one.

    Bounds are products of large matrices, which need none. The environment's own setting stays.
    """
    os.environ.setdefault(CUBLAS, SMALL)


def keep_freed_memory() -> None:
    """Keep freed memory for the next tensor, up to 128 MiB, if the C library is glibc.

    A pass on a CPU takes and frees a few MiB at every step. If these went back to the system each time, they
    would come again page by page, filled with zeros, which takes several times as long as the computation.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, FROM_THE_SYSTEM)
        mallopt(TRIM_THRESHOLD, KEPT)
