"""Describes what a group of ranks may use of its host, as the supervisor plans it and the launcher enforces it.

Limits always hold, and no program that ranks start gains privileges. Where the host allows it, ranks see, besides the
system and the installed packages, only the files of their own job and those that its spec names, and a job on one host
has a network of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from service.jobs.records import ISOLATION_PARTS
from workers.launcher import landlock, namespaces, system_calls
from workers.launcher.landlock import Grant
from workers.linux import forbid_new_privileges

Mode = Literal["auto", "required", "none"]
"""All that the host allows; the same, and no job where it is not everything; limits only."""
_GIB = 1 << 30
_OPEN_FILES = 65_536
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/etc", "/sys", "/proc", "/nix/store")
_SOCKETS = (Path("/run"), Path("/var/run"))
_OF_DRIVERS = (Path("/run/nvidia-persistenced"),)
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "shm", "dri", "kfd", "infiniband", "gdrdrv")


class ConfinementError(Exception):
    """The operator requires something that this host does not allow."""


@dataclass(frozen=True)
class JobLimits:
    """Limits each rank; ``processes`` counts the threads of a whole group."""

    memory_gib: float | None = None
    """The host's memory when absent."""
    file_gib: float = 1024.0
    processes: int = 16_384

    @property
    def memory(self) -> int:
        """Return the bytes of private memory that a rank may have."""
        return _host_memory() if self.memory_gib is None else int(self.memory_gib * _GIB)

    @property
    def shared_memory(self) -> int:
        """Return the bytes of shared memory that a group may have, as files and as segments: what a rank may have of
        its own, but no more than half of the host's.
        """
        return min(self.memory, _host_memory() // 2)


@dataclass(frozen=True)
class Confinement:
    """Confines ranks: the launcher enforces it before it starts one."""

    mode: Mode = "none"
    limits: JobLimits = field(default_factory=JobLimits)
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    """Folders to write in that stand in the place of the folder above them, so that nobody else's are found there.
    Without user namespaces ranks get that folder itself.
    """
    secret: tuple[str, ...] = ()
    """Files and folders that stay unreadable below a readable folder."""
    covered: tuple[str, ...] = ()
    """Folders in which only ``read`` and ``write`` are visible, sockets included."""
    own_network: bool = False
    cuda: bool = False
    """The ranks use CUDA, whose driver names its threads by files in ``/proc`` and does not start where it cannot:
    error 304, seen with driver 580.
    """

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Confinement:
        return cls(**{**fields, "limits": JobLimits(**fields["limits"])})

    def enforce(self, *, in_user_namespace: bool) -> set[str]:
        """Confine the calling thread and all that it starts; which of :data:`ISOLATION_PARTS` hold from now on.

        Raises :class:`ConfinementError` when the mode requires a part that the host does not allow,
        :class:`workers.launcher.landlock.UnsafeGrantError` where a link stands in the place of what is granted, and
        :class:`OSError` when one that it does allow fails.
        """
        held = {"limits"}
        _limit(self.limits, count_processes=in_user_namespace)
        if self.mode == "none":
            return held
        covered = [Path(path) for path in self.covered]
        if in_user_namespace:
            namespaces.own_mounts()
        readable = [*map(Path, self.read), *(_OF_DRIVERS if self.cuda else ())]
        private = [Path(path) if in_user_namespace else Path(path).parent for path in self.private]
        with (
            landlock.held(readable, covered) as read,
            landlock.held(map(Path, self.write), covered) as write,
            landlock.held(private, covered) as parts,
        ):
            placed = [replace(each, path=each.path.parent) if in_user_namespace else each for each in parts]
            held |= self._enforce(covered, read, [*write, *placed], in_user_namespace=in_user_namespace)
        expected = set(ISOLATION_PARTS) - (set() if self.own_network else {"network"})
        if self.mode == "required" and (missing := expected - held):
            lacks = "; ".join(ISOLATION_PARTS[part] for part in ISOLATION_PARTS if part in missing)
            raise ConfinementError(f"job_isolation is 'required', and this host does not allow: {lacks}")
        return held

    def _enforce(
        self, covered: list[Path], read: list[Grant], write: list[Grant], *, in_user_namespace: bool
    ) -> set[str]:
        held: set[str] = set()
        if in_user_namespace:
            namespaces.hide([*covered, *_folders_of_sockets()], [*read, *write])
            held.add("broker")
            if namespaces.own_shared_memory(self.limits.shared_memory):
                held.add("memory")
            if self.own_network:
                namespaces.isolate_network()
                held.add("network")
        has_landlock = landlock.abi() >= landlock.MINIMUM_ABI
        if in_user_namespace and has_landlock:
            namespaces.protect_kernel_settings()
            namespaces.write_only_in(write, Path("/proc"))
        namespaces.drop_capabilities()
        others_are_safe = system_calls.leave_other_processes_alone()
        if has_landlock and not (self.cuda and _may_change_kernel_settings()):
            landlock.restrict(
                [*_system_paths(), *read],
                [*_device_paths(), *write],
                map(Path, self.secret),
                [Path("/proc")] if self.cuda else [],
            )
            if others_are_safe:
                held.add("files")
        return held


def _may_change_kernel_settings() -> bool:
    """Return whether ranks may write more below ``/proc`` than belongs to their processes: as root, outside a namespace
    or container that forbids it.
    """
    return os.access("/proc/sys/kernel/core_pattern", os.W_OK)


def _system_paths() -> Iterator[Path]:
    """Yield the folders of programs, libraries and installed packages."""
    yield from map(Path, _SYSTEM)
    installed = str(Path(__file__).parents[2])
    for entry in (sys.prefix, sys.base_prefix, sys.exec_prefix, installed, *sys.path):
        if entry:
            yield Path(entry)
    for name in ("LD_LIBRARY_PATH", "PATH", "CUDA_HOME", "CUDA_PATH"):
        for entry in os.environ.get(name, "").split(os.pathsep):
            if Path(entry).is_absolute():
                yield Path(entry)


def _folders_of_sockets() -> Iterator[Path]:
    """Yield the folders of sockets of the host's other services, which Landlock does not close; never one with
    programs.
    """
    needed = [path.resolve() for path in _system_paths()]
    for folder in _SOCKETS:
        if folder.is_dir() and not any(path.is_relative_to(folder) for path in needed):
            yield folder


def _device_paths() -> Iterator[Path]:
    """Yield the device files that ranks need: GPUs, random numbers, shared memory."""
    yield from (Path("/dev", name) for name in _DEVICES)
    yield from Path("/dev").glob("nvidia*")


def _limit(limits: JobLimits, *, count_processes: bool) -> None:
    """Set the limits on this process. The memory that counts is private and writable (``RLIMIT_DATA``): the address
    space of a CUDA process, and of one that maps weights, is far larger than what it uses. Processes are counted only
    in a namespace of the group's own: elsewhere all that the user runs on the host would count.
    """
    forbid_new_privileges()
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_DATA: limits.memory,
        resource.RLIMIT_FSIZE: int(limits.file_gib * _GIB),
        resource.RLIMIT_NOFILE: _OPEN_FILES,
    }
    if count_processes:
        wanted[resource.RLIMIT_NPROC] = limits.processes
    for name, value in wanted.items():
        _, hard = resource.getrlimit(name)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (allowed, allowed))


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available() -> tuple[str, ...]:
    """Return which of :data:`ISOLATION_PARTS` this host allows, as tried in a separate process."""
    command = [sys.executable, "-m", "workers.launcher.confinement"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd="/")
        found = re.findall(r"^([a-z]+)$", tried.stdout, re.MULTILINE)
        return tuple(part for part in ISOLATION_PARTS if part in found)
    return ("limits",)


def _try() -> None:
    inside = namespaces.enter_user_namespace()
    for part in sorted(Confinement(mode="auto", own_network=True).enforce(in_user_namespace=inside)):
        print(part)  # noqa: T201 - read by available()


if __name__ == "__main__":
    _try()
