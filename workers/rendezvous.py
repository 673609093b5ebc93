"""How the supervisors of a gang agree on where their launchers meet: the leader leaves a note in the shared folder."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

from service.jobs.records import Claim
from workers.command import Rendezvous

LOOPBACK = "127.0.0.1"


async def agree(claim: Claim, folder: Path, own_address: str, within_s: float = 300.0) -> Rendezvous:
    """The meeting point of the claimed attempt; followers wait for the leader's note, then raise ``TimeoutError``."""
    if len(claim.shares) == 1:
        return Rendezvous(LOOPBACK, 0, leads=True)
    note = folder / "rendezvous.json"
    if claim.shares[0].host == claim.ref.host:
        meeting = Rendezvous(claim.leader_address, free_port(own_address), leads=True)
        _leave(note, meeting)
        return meeting
    async with asyncio.timeout(within_s):
        while not note.exists():
            await asyncio.sleep(0.05)
    found = json.loads(note.read_text())
    return Rendezvous(str(found["address"]), int(found["port"]), leads=False)


def free_port(address: str) -> int:
    """A port that was free a moment ago. Between this look and torchrun's bind another process could take it."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def _leave(note: Path, meeting: Rendezvous) -> None:
    draft = note.with_suffix(".part")
    draft.write_text(json.dumps({"address": meeting.address, "port": meeting.port}))
    draft.replace(note)
