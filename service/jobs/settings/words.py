"""Reads settings that are lists: several words in one, by comma."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def entries(text: str) -> list[str]:
    """Return the items of a comma-separated setting."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def networks(text: str) -> list[Network]:
    """Return the addresses and networks of a setting. Raises ``ValueError`` with the entry that is neither."""
    found: list[Network] = []
    for entry in entries(text):
        try:
            found.append(ipaddress.ip_network(entry))
        except ValueError as error:
            raise ValueError(f"{entry!r} is neither an address nor a network: {error}") from None
    return found


def _checked(text: str) -> str:
    networks(text)
    return text


Addresses = Annotated[str, AfterValidator(_checked)]
"""Addresses and networks, by comma."""
