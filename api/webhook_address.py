"""Decides which addresses webhooks may be sent to: what a key holder names must not reach into the operator's network.

A name is resolved once, and the connection goes to an address that was looked at, so that no second answer of its name
server can lead elsewhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
_DEFAULT_PORTS = {"https": 443, "http": 80}


class ForbiddenTarget(Exception):  # noqa: N818
    """A webhook's URL leads where none may."""


@dataclass(frozen=True)
class WebhookAddress:
    """An address that was looked at, and the name that it stands for."""

    address: str
    host: str
    port: int
    scheme: str

    @property
    def url(self) -> str:
        """Return scheme, address and port, without a path."""
        shown = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.scheme}://{shown}:{self.port}"

    @property
    def authority(self) -> str:
        """Return what the ``Host`` header says."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _DEFAULT_PORTS[self.scheme] else f"{name}:{self.port}"


def is_public(address: _Address) -> bool:
    """Return whether an address is one of the public internet, also where it stands for another one."""
    if isinstance(address, ipaddress.IPv6Address):
        if any(address in network for network in _NAT64):
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(each is not None and not is_public(each) for each in inner):
            return False
        if address.ipv4_mapped is not None:
            return True
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def may_reach(address: str, scheme: str, allowed: Sequence[_Network]) -> bool:
    """Return whether a webhook may be sent to an address: a public one over TLS, or any that the operator allows."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    if any(each in network for network in allowed for each in (found, mapped) if each is not None):
        return True
    return scheme == "https" and is_public(found)


async def vetted(url: str, allowed: Sequence[_Network]) -> WebhookAddress:
    """Resolve a webhook's URL. Raises :class:`ForbiddenTarget`, or ``OSError`` for a name that nobody knows."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme]
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    for address in addresses:
        if may_reach(address, parts.scheme, allowed):
            return WebhookAddress(address, host, port, parts.scheme)
    public = any(is_public(ipaddress.ip_address(address.partition("%")[0])) for address in addresses)
    reason = "is reached over https:// only" if public else "is no public address, nor in TRIVET_WEBHOOK_ALLOW"
    raise ForbiddenTarget(f"{host} ({', '.join(addresses)}) {reason}")
