"""Reads settings that are lists: several words in one, by comma."""

from __future__ import annotations

import ipaddress


def entries(text: str) -> list[str]:
    """Return the items of a comma-separated setting."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def addresses(text: str) -> str:
    """Return a list of addresses and networks. Raises ``ValueError`` with the entry that is neither."""
    for entry in entries(text):
        try:
            ipaddress.ip_network(entry)
        except ValueError as error:
            raise ValueError(f"{entry!r} is neither an address nor a network: {error}") from None
    return text
