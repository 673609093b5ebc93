"""Describes what a group of ranks may use of its host, as the supervisor plans it and the launcher enforces it.

Limits always hold, and no program that ranks start gains privileges. Where the host allows it, ranks see, besides the
system and the installed packages, only the files of their own job and those that its spec names, and a job on one host
has a network of its own.

Seccomp refuses system calls that act on other processes of the same user beyond files and signals. Otherwise a
process could set the limits of every process of its user and, if both are unprivileged, their priorities: a
limit of one second of processor time ends a broker. It also leaves only the families of sockets that ranks need: those
of virtual machines, for example, belong to no network namespace. As io_uring makes sockets past this, it is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from service.jobs.host import ISOLATION_PARTS
from service.linux import forbid_new_privileges
from workers.launcher import landlock, namespaces
from workers.launcher.landlock import Grant

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Where a filter finds the call's number, its architecture and its arguments, 8 bytes each, the lower half first."""
_X32 = 0x40000000
_OF_PROCESS = {
    # Calls by the argument that names a process: 0 is the calling one.
    "sched_setattr": 0,
    "sched_setparam": 0,
    "sched_setscheduler": 0,
    "setpriority": 1,
    "ioprio_set": 1,
}
_ONE_PROCESS = {"setpriority": 0, "ioprio_set": 1}
"""The value of the first argument with which the second names one process, not all processes of a group or user."""
_FAMILIES = tuple(map(int, (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)))
"""The families of sockets that gloo, NCCL and the drivers use."""
_ARCHITECTURES = {
    "x86_64": (
        0xC000003E,
        {
            "prlimit64": 302,
            "sched_setattr": 314,
            "sched_setparam": 142,
            "sched_setscheduler": 144,
            "setpriority": 141,
            "ioprio_set": 251,
            "socket": 41,
            "socketpair": 53,
            "io_uring_setup": 425,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "prlimit64": 261,
            "sched_setattr": 274,
            "sched_setparam": 118,
            "sched_setscheduler": 119,
            "setpriority": 140,
            "ioprio_set": 30,
            "socket": 198,
            "socketpair": 199,
            "io_uring_setup": 425,
        },
    ),
}
"""How filters name an architecture, and the numbers of its calls."""

_Instruction = tuple[int, int, int, int]
_libc = ctypes.CDLL(None, use_errno=True)


def leave_other_processes_alone() -> bool:
    """Let the calling thread, and all that it starts, set limits and priorities only of the calling process
    from now on, and make sockets only of :data:`_FAMILIES`. Return false if that is impossible: on another
    architecture, or a kernel without filters.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return False
    program = list(_program(*_ARCHITECTURES[machine]))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    described = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    forbid_new_privileges()
    words = (ctypes.c_ulong(_MODE_FILTER), described, ctypes.c_ulong(0), ctypes.c_ulong(0))
    return bool(_libc.prctl(_PR_SET_SECCOMP, *words) == 0)


def _program(architecture: int, numbers: dict[str, int]) -> Iterator[_Instruction]:
    """Yield the filter, a program of classic BPF."""
    unknown = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    yield from [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), unknown]
    yield from [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), unknown]
    # A process (0 is the calling one), or no new value.
    yield from _unless(numbers["prlimit64"], [[(_argument(0), 0)], [(_argument(2), 0), (_argument(2) + 4, 0)]])
    for call, place in _OF_PROCESS.items():
        first = [(_argument(0), _ONE_PROCESS[call])] if call in _ONE_PROCESS else []
        yield from _unless(numbers[call], [[*first, (_argument(place), 0)]])
    for call in ("socket", "socketpair"):
        families = [[(_argument(0), family)] for family in _FAMILIES]
        yield from _unless(numbers[call], families, errno.EAFNOSUPPORT)
    yield from _unless(numbers["io_uring_setup"], [], errno.ENOSYS)
    yield (_RETURN, 0, 0, _ALLOW)


def _unless(number: int, allowed: list[list[tuple[int, int]]], refusal: int = errno.EPERM) -> Iterator[_Instruction]:
    """Yield the instructions that refuse a call unless all words of one of the lists match."""
    body: list[_Instruction] = []
    for words in allowed:
        left = 2 * len(words) + 1
        for place, wanted in words:
            left -= 2
            body += [(_LOAD, 0, 0, place), (_EQUAL, 0, left, wanted)]
        body.append((_RETURN, 0, 0, _ALLOW))
    body.append((_RETURN, 0, 0, _ERRNO | refusal))
    yield from [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, len(body), number), *body]


def _argument(place: int) -> int:
    return _ARGUMENTS + 8 * place


Mode = Literal["auto", "required", "none"]
"""Everything that the host allows; everything, or no job runs; limits only."""
_GIB = 1 << 30
_OPEN_FILES = 65_536
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/sys", "/proc", "/nix/store")
_OF_SYSTEM = (
    "alternatives", "ca-certificates", "ca-certificates.conf", "crypto-policies", "debian_version", "fonts", "gai.conf",
    "glvnd", "host.conf", "hostname", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld.so.preload",
    "libibverbs.d", "libnl", "libnl-3", "locale.alias", "locale.conf", "localtime", "lsb-release", "magic",
    "mime.types", "nccl.conf", "networks", "nsswitch.conf", "nvidia", "OpenCL", "os-release", "pki/ca-trust/extracted",
    "pki/tls/cert.pem", "pki/tls/certs", "pki/tls/openssl.cnf", "protocols", "python3", "rdma", "redhat-release",
    "resolv.conf", "services", "ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf", "timezone", "ucx", "vulkan",
    "group", "passwd",
)  # fmt: skip
"""What programs and libraries read in ``/etc``; passwords and keys lie beside it."""
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
    niceness: int = 0
    """What is added to the ranks' niceness: processes with less go first."""

    @property
    def memory(self) -> int:
        """Return the bytes of private memory that a rank may have."""
        return _host_memory() if self.memory_gib is None else int(self.memory_gib * _GIB)

    @property
    def shared_memory(self) -> int:
        """Return the bytes of shared memory that a group may have, as files and as segments: as much as a
        rank's own memory, but at most half of the host's.
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
    """Writable folders that hide the folder above them, which holds the folders of others. Without user
    namespaces, ranks get that folder itself.
    """
    secret: tuple[str, ...] = ()
    """Files and folders that stay unreadable below a readable folder."""
    covered: tuple[str, ...] = ()
    """Folders in which only ``read`` and ``write`` are visible, sockets included."""
    own_network: bool = False
    needs: tuple[str, ...] = ()
    """Parts of :data:`ISOLATION_PARTS` without which the ranks do not run, unless the mode is ``none``."""
    cuda: bool = False
    """Whether the ranks use CUDA, whose driver names its threads by files in ``/proc`` and does not start if it
    cannot: error 304, seen with driver 580.
    """

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Confinement:
        return cls(**{**fields, "limits": JobLimits(**fields["limits"])})

    def enforce(self, *, in_user_namespace: bool) -> set[str]:
        """Confine the calling thread and all that it starts; return which of :data:`ISOLATION_PARTS` hold from now
        on.

        Raises :class:`ConfinementError` if the mode requires a part that the host does not allow,
        :class:`workers.launcher.landlock.UnsafeGrantError` for a link in the place of a granted path, and
        :class:`OSError` if an allowed part fails.
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
        why = "job_isolation is 'required'" if self.mode == "required" else "the job brings code of its own"
        if missing := (expected if self.mode == "required" else set(self.needs)) - held:
            lacks = "; ".join(ISOLATION_PARTS[part] for part in ISOLATION_PARTS if part in missing)
            raise ConfinementError(f"{why}, and this host does not allow: {lacks}")
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
        others_are_safe = leave_other_processes_alone()
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
    yield from (Path("/etc", name) for name in _OF_SYSTEM)
    yield from Path("/etc").glob("python3.*")
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
    """Set the limits on this process. Private, writable memory counts (``RLIMIT_DATA``): the address space of a
    process that uses CUDA or maps weights is far larger than its memory. Processes are counted only in the
    group's own namespace: elsewhere every process of the user on the host would count.
    """
    forbid_new_privileges()
    os.nice(limits.niceness)
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
