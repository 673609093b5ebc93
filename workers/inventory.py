"""Counts the devices of this host: GPUs as the driver lists them, and slots for ranks on the CPU."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import pynvml

from service.jobs.plugins.catalogue import house_version
from service.jobs.spec.families.packaged import versions_here
from service.torch_internals.installed import installed_torch

_SMALL_MESH = 4
"""Even ranks that share a core show that a mesh works: two by two is the smallest mesh with two dimensions."""


def versions() -> dict[str, str]:
    """Return the versions of the packages that ranks of this host run."""
    return {
        "trivet": house_version(),
        "torch": installed_torch().version,
        "python": platform.python_version(),
        **versions_here(),
    }


def cuda_devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return names of the GPUs that a process with ``environment`` may use, by CUDA index (PCI bus order); asks the
    driver's management library, so no CUDA context is made. Empty without a driver.

    As in CUDA, ``CUDA_VISIBLE_DEVICES`` selects by index or UUID, and ends at its first entry that names no device.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        chosen = environment.get("CUDA_VISIBLE_DEVICES")
        if chosen is None:
            return tuple(_name(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount()))
        return _read_visible(chosen)
    finally:
        pynvml.nvmlShutdown()


def cpu_slots(setting: int | None) -> int:
    """Return how many CPU ranks may run here: the operator's choice, else one per usable core, but enough for a small
    mesh.
    """
    return max(_SMALL_MESH, usable_cores()) if setting is None else setting


def usable_cores() -> int:
    """Count the cores that this process may use, by its affinity and by the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    return cores if (quota := _quota(Path("/sys/fs/cgroup"))) is None else max(1, min(cores, round(quota)))


def _quota(groups: Path) -> float | None:
    """Return the cores that the control group of this process, as a container sees it, may use at a time; ``None`` for
    no limit.
    """
    try:
        most, period = (groups / "cpu.max").read_text().split()
    except (OSError, ValueError):  # no second version of control groups, or none of this process's own
        return None
    return None if most == "max" else int(most) / int(period)


def threads_of_a_rank(devices: int) -> int:
    """Return how many threads a rank may compute with: the share of one device on a host of so many, so that ranks on
    all of them have a core for each thread.
    """
    return max(1, usable_cores() // max(1, devices))


def oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended on this host since it booted, in containers
    too; 0 if the kernel does not say.
    """
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counters.get("oom_kill", 0))


def _read_visible(entries: str) -> tuple[str, ...]:
    names: list[str] = []
    for entry in entries.split(","):
        try:
            names.append(_name(_handle(entry.strip())))
        except (pynvml.NVMLError, ValueError):
            break
    return tuple(names)


def _handle(entry: str) -> object:
    if entry.startswith(("GPU-", "MIG-")):
        return pynvml.nvmlDeviceGetHandleByUUID(entry)
    return pynvml.nvmlDeviceGetHandleByIndex(int(entry))


def _name(handle: object) -> str:
    name = pynvml.nvmlDeviceGetName(handle)
    return name.decode() if isinstance(name, bytes) else str(name)
