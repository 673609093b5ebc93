"""Joining and leaving the process group that a launcher prepared.

The launcher (torchrun) owns ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``; they are
read here and never written. A process that no launcher started works alone, without a group. Under the service, whose
launchers open no port, ranks meet in the private folder that ``TRIVET_RENDEZVOUS`` names.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import pickle
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from service.jobs.files import flush, used
from service.jobs.runtime import RendezvousError, rendezvous_folder
from service.torch_internals.table import internal

T = TypeVar("T")

# CUDA ranks get a CPU backend too: metadata and checkpoint planning run on CPU tensors.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
"""Freed blocks of any size join again, so that reserved memory stays near the memory in use; read at the first use."""


class LaunchError(RuntimeError):
    """The launcher's variables cannot start this rank."""


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

    Without a launcher no group is made. Calling it again changes nothing. NCCL makes its communicator now, or, for a
    rank alone, which seldom needs one, with the first collective: that takes half a second.
    """
    launch = read_launch(os.environ)
    device = _started_device(device_type, launch)
    if launch.grouped and not dist.is_initialized():
        folder = os.environ.get(rendezvous_folder.VARIABLE)
        dist.init_process_group(
            _BACKENDS[device_type],
            store=None if folder is None else _join(Path(folder), launch.world_size),
            rank=-1 if folder is None else launch.rank,
            world_size=-1 if folder is None else launch.world_size,
            device_id=device if device.type == "cuda" and launch.world_size > 1 else None,
        )
    return device


def answer_environment() -> None:
    """Let torch's ``env://``, by which scripts join their group, meet where the launcher's ranks meet: nothing listens
    at ``MASTER_PORT``. Each group that a process makes has a place of its own there.
    """
    launch, folder = read_launch(os.environ), os.environ.get(rendezvous_folder.VARIABLE)
    if folder is None or not launch.grouped:
        return
    store, groups = _join(Path(folder), launch.world_size), itertools.count()

    def meet(_url: str, **_: Any) -> Iterator[tuple[distributed_c10d.Store, int, int]]:
        apart = dist.PrefixStore(f"script-{next(groups)}", store)  # type: ignore[attr-defined]
        yield apart, launch.rank, launch.world_size

    internal("torch.distributed.rendezvous._rendezvous_handlers")["env"] = meet


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


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; without a group it is rank 0 of 1."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the ``value`` of every rank, or of those of ``group``, by rank; a list of one in a process alone."""
    if rank_and_size()[1] == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first_rank(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return the first rank's ``value``, on every rank."""
    if rank_and_size()[1] == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group, device=torch.device("cpu"))
    return values[0]


def can_abort() -> bool:
    """Return whether :func:`abandon` ends this process's waits; gloo ends them when the other side's process ends."""
    return dist.is_initialized() and "nccl" in str(dist.get_backend())


def abandon() -> None:
    """Leave the group although its collectives may never end; none is left afterwards."""
    if not dist.is_initialized():
        return
    if can_abort():
        internal("torch.distributed.distributed_c10d._abort_process_group")()  # experimental, and for NCCL alone
    else:
        dist.destroy_process_group()


_DIGEST = "sha256"
_SIGNATURE = hashlib.new(_DIGEST).digest_size


def _join(folder: Path, world_size: int) -> distributed_c10d.Store:
    """Return the store of the group that meets in ``folder``; this process then takes objects of its group only."""
    authenticate_objects(rendezvous_folder.secret(folder))
    return dist.FileStore(str(folder / rendezvous_folder.RANKS), world_size)  # type: ignore[attr-defined]


def authenticate_objects(secret: bytes) -> None:
    """Make torch's object collectives sign pickles with ``secret``, and refuse others."""
    for name in ("torch.distributed.distributed_c10d._pickler", "torch.distributed.distributed_c10d._unpickler"):
        internal(name)  # setting names that torch does not read would leave pickles unsigned
    private: Any = distributed_c10d
    private._pickler = partial(_SigningPickler, secret=secret)
    private._unpickler = partial(_CheckingUnpickler, secret=secret)


class _SigningPickler:
    """A :class:`pickle.Pickler` that writes an HMAC-SHA256 of the pickle before it."""

    def __init__(self, file: IO[bytes], *, secret: bytes) -> None:
        self._file, self._secret = file, secret

    def dump(self, value: Any) -> None:
        """Write ``value``."""
        content = pickle.dumps(value)
        self._file.write(hmac.digest(self._secret, content, _DIGEST) + content)


class _CheckingUnpickler:
    """Reads pickles that :class:`_SigningPickler` wrote with the same secret; others raise :class:`RendezvousError`."""

    def __init__(self, file: IO[bytes], *, secret: bytes) -> None:
        self._file, self._secret = file, secret

    def load(self) -> Any:
        """Return the object that was pickled."""
        signature, content = self._file.read(_SIGNATURE), self._file.read()
        if not hmac.compare_digest(signature, hmac.digest(self._secret, content, _DIGEST)):
            raise RendezvousError("an object came from a process outside this group, and was not unpickled")
        return pickle.Unpickler(BytesIO(content)).load()  # noqa: S301 - it is this group's own


def peak_memory_gib(device: torch.device) -> float:
    """Return the most GiB that torch ever had allocated on a CUDA device; on a CPU the most that this process ever
    had in memory, which includes what it has imported.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


_POLL_S = 0.1


def build_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Return ``path``, made by the first rank if it is missing; the others wait for it, however long that takes.

    ``make`` writes a file or folder at the path that it is given. It appears as ``path`` only when it is complete and
    on disk: it is not checked later, so a file that a power loss cut short would pass for whole.
    """
    if dist.is_initialized() and dist.get_rank() > 0:
        # No collective: it could time out. If the first rank fails, the launcher ends this one.
        while not path.exists():
            time.sleep(_POLL_S)
    elif not path.exists():
        _make(path, make)
    else:
        used(path)
    return path


def _make(path: Path, make: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=".making-", dir=path.parent))
    try:
        made = working / path.name
        make(made)
        for file in (made, *made.rglob("*")):
            flush(file)
        made.rename(path)
        flush(path.parent)
    except OSError:
        if not path.exists():  # another job has made it meanwhile
            raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
