"""Joining and leaving the process group that a launcher prepared.

The launcher (torchrun) owns ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``; they are
read here and never written. A process that no launcher started works alone, without a group. Under the service, whose
launchers open no port, ranks meet in the private folder that ``TRIVET_RENDEZVOUS`` names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from service.jobs import rendezvous_folder
from service.parallel.signed_objects import join

# CUDA ranks get a CPU backend too: metadata and checkpoint planning run on CPU tensors.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
"""Freed blocks of any size join again, so that reserved memory stays near what is in use; read at the first use."""


class LaunchError(RuntimeError):
    """What the launcher gave cannot start this rank."""


@dataclass(frozen=True)
class Launch:
    """This process among its peers; ``grouped`` is false without a launcher."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    grouped: bool = False


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Return the launcher's variables, all or none; :class:`LaunchError` names what is missing or not a number."""
    missing = [name for name in _LAUNCHER_VARIABLES if name not in environment]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return Launch()
    if missing:
        raise LaunchError(f"the launcher set RANK or WORLD_SIZE but not {', '.join(missing)}")
    numbers = {}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        if not environment[name].isdecimal():
            raise LaunchError(f"{name}={environment[name]!r} is not a whole number")
        numbers[name] = int(environment[name])
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise LaunchError(f"RANK={numbers['RANK']} is not below WORLD_SIZE={numbers['WORLD_SIZE']}")
    return Launch(numbers["RANK"], numbers["LOCAL_RANK"], numbers["WORLD_SIZE"], grouped=True)


def local_device(device_type: str, launch: Launch) -> torch.device:
    """Return the device of this rank: ``cpu``, or the CUDA device of its local rank."""
    if device_type not in _BACKENDS:
        raise LaunchError(f"device type {device_type!r}; expected {' or '.join(_BACKENDS)}")
    if device_type == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if launch.local_rank >= visible:
        raise LaunchError(f"LOCAL_RANK={launch.local_rank} needs a CUDA device of that index; {visible} are visible")
    return torch.device("cuda", launch.local_rank)


def start(device_type: str) -> torch.device:
    """Join the launcher's group (gloo for CPU; NCCL, with gloo beside it, for CUDA) and return this rank's device.

    Without a launcher no group is made. Calling it again changes nothing.
    """
    launch = read_launch(os.environ)
    device = _started_device(device_type, launch)
    if launch.grouped and not dist.is_initialized():
        folder = os.environ.get(rendezvous_folder.VARIABLE)
        dist.init_process_group(
            _BACKENDS[device_type],
            store=None if folder is None else join(Path(folder), launch.world_size),
            rank=-1 if folder is None else launch.rank,
            world_size=-1 if folder is None else launch.world_size,
            device_id=device if device.type == "cuda" else None,
        )
    return device


def start_alone(device_type: str) -> torch.device:
    """Return the device of this rank, the launcher's only one, in a group of this process alone, as each of several
    processes of the rank may be.
    """
    launch = read_launch(os.environ)
    device = _started_device(device_type, launch)
    if launch.grouped and not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_BACKENDS[device_type], store=store, rank=0, world_size=1)
    return device


def _started_device(device_type: str, launch: Launch) -> torch.device:
    device = local_device(device_type, launch)
    if device.type == "cuda":
        os.environ.setdefault(*_ALLOCATOR)
        torch.cuda.set_device(device)
    return device


def stop() -> None:
    """Leave the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def can_abort() -> bool:
    """Return whether :func:`abandon` ends what this process waits for; gloo ends it when the other side's
    process does.
    """
    return dist.is_initialized() and "nccl" in str(dist.get_backend())


def abandon() -> None:
    """Leave the group although collectives of it may never end; afterwards there is none."""
    if not dist.is_initialized():
        return
    if can_abort():
        dist.distributed_c10d._abort_process_group()  # experimental, and for NCCL alone, on torch 2.11 to 2.13
    else:
        dist.destroy_process_group()
