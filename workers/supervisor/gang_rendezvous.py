"""Lets the supervisors of a gang agree on a meeting point: the leader makes a private folder for their groups."""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import psutil

from service.jobs import rendezvous_folder
from service.jobs.records import Claim

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Rendezvous:
    """Locates the meeting point of an attempt's launchers and ranks, and the network interface of this host for
    ranks.
    """

    folder: Path
    """See :mod:`service.jobs.rendezvous_folder`."""
    address: str
    """The address of the leading host."""
    interface: str


async def agree(claim: Claim, attempt: Path, scratch: Path, own_address: str, within_s: float = 300.0) -> Rendezvous:
    """Return the meeting point of the claimed attempt: in ``scratch``, which only this host sees, when the attempt runs
    here alone, else in the shared folder ``attempt``.

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
