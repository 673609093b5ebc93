"""Makes the folders of an attempt: its own, that of an owner's compiled code, and the one in which a gang meets.

One owner's compiled code, in a host's cache or a gate's artifacts, is closed to all other owners. The leader of
a gang makes a private folder for the groups of all its supervisors.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from service.jobs.accounts import owner_in
from service.jobs.events import OddWord, rank_file, read_object, unpack
from service.jobs.files import Folder, JobPaths
from service.jobs.records import Claim
from service.jobs.runtime import LARGEST_RESULT, RESULT, SPEC, rendezvous_folder
from service.jobs.store import Store
from workers.rank.stacks import stacks_file


def open_attempt(paths: JobPaths, number: int) -> Folder:
    """Open the folder of an attempt, and make all folders in which its ranks may write.

    Raises :class:`OSError` if something else stands in their place.
    """
    paths.root.mkdir(parents=True, exist_ok=True)
    with Folder.open(paths.root) as root:
        for path in (paths.artifacts, paths.checkpoints, paths.published, paths.work(number)):
            root.make(path.relative_to(paths.root).as_posix()).close()
        return root.folder(paths.attempt(number).relative_to(paths.root).as_posix())


def make_files_of_ranks(paths: JobPaths, claim: Claim) -> None:
    """Make the files and folders that the claimed part's ranks write, with their spec."""
    folder = paths.attempt(claim.ref.attempt)
    with open_attempt(paths, claim.ref.attempt) as attempt:
        unpack(attempt)  # as below: it had succeeded
        for rank in claim.ranks:
            attempt.append(rank_file(folder, rank).name).close()
            attempt.append(stacks_file(folder, rank).name).close()
        attempt.write(SPEC, claim.spec.model_dump_json(by_alias=True).encode())
        with attempt.folder("work") as work:
            # A broker that lost its last writes gives the same attempt number again.
            work.remove(RESULT)


@dataclass(frozen=True)
class LeftResult:
    """What rank 0 has left as its result."""

    result: dict[str, Any] | None = None
    odd: str = ""
    """Why what it left is no result."""

    @staticmethod
    def read(work: Path) -> LeftResult:
        try:
            return LeftResult(read_result(work))
        except OddWord as error:
            return LeftResult(odd=str(error))


def read_result(work: Path) -> dict[str, Any] | None:
    """Return the result that rank 0 left, None if there is none. Raises :class:`OddWord` if what is there is none."""
    try:
        with Folder.open(work) as folder:
            return read_object(folder.read(RESULT, LARGEST_RESULT), LARGEST_RESULT)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OddWord(f"it cannot be read: {error}") from error


def gate_artifacts(store: Store, claim: Claim) -> tuple[str, dict[str, str]]:
    """Return the claimed job's owner within its project, and the artifacts of its gate's job as SHA-256 by
    name, from their manifest; none if that job is another owner's. Raises
    :class:`service.jobs.store.StoreUnavailable`.
    """
    job = store.jobs.get(claim.ref.job_id)
    owner, gate = owner_in(job.project, job.owner), claim.spec.gate_job
    if gate is None or gate not in claim.needed:
        return owner, {}
    gates = store.jobs.get(gate)
    if owner_in(gates.project, gates.owner) != owner:
        return owner, {}
    return owner, {artifact.name: artifact.sha256 for artifact in store.artifacts.list(gate) if artifact.sha256}


def compiled_caches() -> Path:
    """Return the folder of all owners' caches on this host."""
    return Path(tempfile.gettempdir(), f"trivet-compiled-{os.geteuid()}")


def compile_cache(owner: str) -> Path:
    """Return a private folder, on this host, for code that the jobs of ``owner`` compiled.

    All jobs share torch's default folder, and another user may take its name first.
    """
    base = compiled_caches()
    folder = base / hashlib.sha256(owner.encode()).hexdigest()[:32]
    for path in (base, folder):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
            return Path(tempfile.mkdtemp(prefix="trivet-compiled-"))
    return folder


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Rendezvous:
    """The meeting point of an attempt's launchers and ranks, and this host's network interface for ranks."""

    folder: Path
    """See :mod:`service.jobs.runtime.rendezvous_folder`."""
    address: str
    """The address of the leading host."""
    interface: str


async def agree(claim: Claim, attempt: Path, scratch: Path, own_address: str, within_s: float = 300.0) -> Rendezvous:
    """Return the meeting point of the claimed attempt: in ``scratch``, which only this host sees, if the
    attempt runs only here, else in the shared folder ``attempt``.

    Followers wait for the leader to make it, then raise ``TimeoutError``. A folder that another user could have
    written raises :class:`RendezvousError`; an address that this host does not have raises
    ``ValueError``.
    """
    if len(claim.shares) == 1:
        return Rendezvous(rendezvous_folder.make(scratch / "rendezvous"), LOOPBACK, interface_of(LOOPBACK))
    folder = attempt / "rendezvous"
    interface = interface_of(own_address)
    if claim.leads:
        rendezvous_folder.make(folder)
    else:
        async with asyncio.timeout(within_s):
            while not folder.exists():
                await asyncio.sleep(0.05)
        rendezvous_folder.check(folder)
    return Rendezvous(folder, claim.leader_address, interface)


def interface_of(address: str) -> str:
    """Return this host's network interface with ``address``; ``ValueError`` lists all addresses if none has it."""
    known = {
        entry.address.partition("%")[0]: name for name, entries in psutil.net_if_addrs().items() for entry in entries
    }
    name = known.get(LOOPBACK if ipaddress.ip_address(address).is_loopback else address)
    if name is None:
        raise ValueError(
            f"worker_address={address!r} is not an address of this host; expected one of {', '.join(known)}"
        )
    return name
