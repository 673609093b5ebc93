"""Decides to which addresses webhooks may go: a key holder's URL must not reach into the operator's network.

A name is resolved once, and the connection goes to a checked address, so that no second answer of its name server can
lead elsewhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote, urlsplit

from service.jobs.records import Problem
from service.jobs.settings import Network, Settings
from service.jobs.spec.common import OFFLINE, check_sendable

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
_RESERVED = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "100:0:0:1::/64", "3fff::/20", "5f00::/16"))
)
"""Networks for special purposes that some versions of the interpreter take for public ones."""
DEFAULT_PORTS = {"https": 443, "http": 80}


class ForbiddenTarget(Exception):  # noqa: N818
    """A webhook's URL leads to a forbidden address."""


@dataclass(frozen=True)
class WebhookAddress:
    """A checked address, and the name that it stands for."""

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
        """Return the value of the ``Host`` header."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == DEFAULT_PORTS[self.scheme] else f"{name}:{self.port}"


def is_public(address: _Address) -> bool:
    """Return whether an address is on the public internet, even if it stands for another one."""
    if any(address in network for network in _RESERVED):
        return False
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


def may_reach(address: str, scheme: str, allowed: Sequence[Network]) -> bool:
    """Return whether a webhook may be sent to an address: a public one over TLS, or any that the operator allows."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    if any(each in network for network in allowed for each in (found, mapped) if each is not None):
        return True
    return scheme == "https" and is_public(found)


async def vetted(url: str, allowed: Sequence[Network]) -> WebhookAddress:
    """Resolve a webhook's URL. Raises :class:`ForbiddenTarget`, or ``OSError`` for a name that does not resolve."""
    try:
        check_sendable(url)
    except ValueError as error:
        raise ForbiddenTarget(f"nothing can be sent to {url!r}; expected {error}") from None
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    for address in addresses:
        if may_reach(address, parts.scheme, allowed):
            return WebhookAddress(address, host, port, parts.scheme)
    public = any(is_public(ipaddress.ip_address(address.partition("%")[0])) for address in addresses)
    reason = "is reached over https:// only" if public else "is neither a public address nor in TRIVET_WEBHOOK_ALLOW"
    raise ForbiddenTarget(f"{host} ({', '.join(addresses)}) {reason}")


def check_recipient(settings: Settings, url: str) -> None:
    """Raise ``ValueError`` that says what is accepted, for a ``mailto:`` that this service sends nothing to."""
    if settings.smtp_url is None:
        raise ValueError("an https:// URL: this service sends no e-mail (TRIVET_SMTP_URL is not set)")
    address = url.removeprefix("mailto:").lower()
    if not {address, f"@{address.rpartition('@')[2]}"} & set(settings.mail_recipients):
        raise ValueError(f"one of {', '.join(settings.mail_recipients)}, whom TRIVET_SMTP_TO allows")


def token_for(url: str, tokens: Mapping[str, str]) -> str | None:
    """Return the token of the longest URL that ``url`` is, or lies below: of the same scheme, host and port."""
    server, path = _place(url)
    if any(part in (".", "..") for part in unquote(path).replace("\\", "/").split("/")):
        return None
    fitting = [each for each in tokens if _place(each)[0] == server and f"{path}/".startswith(f"{_place(each)[1]}/")]
    return tokens[max(fitting, key=len)] if fitting else None


def _place(url: str) -> tuple[tuple[str, str, int], str]:
    """Return a URL's server, and its path without a slash at the end."""
    parts = urlsplit(url)
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    return (parts.scheme, parts.hostname or "", port), parts.path.rstrip("/")


def has_wandb() -> bool:
    """Return whether W&B's package is installed, without importing it; a folder of that name is none."""
    found = find_spec("wandb")
    return found is not None and found.origin is not None


_LOOKED_UP = 16
"""Most URLs of one request that are checked; the others are checked when something is sent."""
_ANSWER_S = 2.0
_EXPECTED = "https:// and a public address, or one that the operator allows (TRIVET_WEBHOOK_ALLOW)"


class NamedAddresses:
    """Checks the URLs in specs by the operator's settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._allowed = settings.webhook_networks
        self._own = {f"export.{name}": getattr(settings, f"export_{name}") for name in ("mlflow", "otlp", "wandb")}

    async def problems(self, specs: Mapping[str, str]) -> list[Problem]:
        """Return the problems with URLs in specs, which are given as JSON by path: forbidden addresses, and what is
        missing here for others. A name that does not resolve in time is no problem yet.
        """
        said = ("://", "mailto:", OFFLINE)
        naming = {at: text for at, text in specs.items() if any(each in text for each in said)}  # most specs do not
        named = [(path, url) for at, text in naming.items() for path, url in self._urls(at, json.loads(text))]
        missing = (each for pair in dict.fromkeys(named) if (each := self._missing(*pair)))
        return [*await self.forbidden(named), *missing]

    async def forbidden(self, named: Iterable[tuple[str, str]]) -> list[Problem]:
        """Return the problems with URLs, each with its path, that lead where nothing may be sent."""
        found = [(path, url) for path, url in named if "://" in url]
        urls = list(dict.fromkeys(url for _, url in found))[:_LOOKED_UP]
        reasons = dict(zip(urls, await asyncio.gather(*map(self._reason, urls)), strict=True))
        return [Problem(path, told[0], url, told[1]) for path, url in found if (told := reasons.get(url))]

    def _missing(self, path: str, url: str) -> Problem | None:
        """Return the problem with what this service lacks for an address: a package, a key, or that it sends e-mail."""
        if path.endswith("export.wandb"):
            return self._missing_for_wandb(path, url)
        return self._unsent(path, url) if url.startswith("mailto:") else None

    def _missing_for_wandb(self, path: str, url: str) -> Problem | None:
        if not has_wandb():
            expected = "a service with it: pip install 'trivet[wandb]' where the API runs"
            return Problem(path, "this service has no package wandb", url, expected)
        if url != OFFLINE and token_for(url, self._settings.bearer_tokens) is None:
            expected = f"`{OFFLINE}`, or a URL for which the operator has set a key (TRIVET_EXPORT_TOKENS)"
            return Problem(path, "this service has no key for that server", url, expected)
        return None

    def _unsent(self, path: str, url: str) -> Problem | None:
        """Return the problem with an address to which this service sends no e-mail."""
        try:
            check_recipient(self._settings, url)
        except ValueError as error:
            return Problem(path, "this service sends no e-mail there", url, str(error))
        return None

    def _urls(self, at: str, spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the URLs of a spec that are not the operator's own, each with the path of its field."""
        for path in ("notify.webhook", *self._own):
            part, _, name = path.partition(".")
            url = (spec.get(part) or {}).get(name)
            if url is not None and url != self._own.get(path):
                yield ".".join(filter(None, (at, path))), url

    async def _reason(self, url: str) -> tuple[str, str] | None:
        """Return why nothing may be sent to a URL, and what is accepted."""
        try:
            check_sendable(url)
        except ValueError as error:
            return "no request can have this URL", str(error)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await vetted(url, self._allowed)
        except ForbiddenTarget as error:
            return str(error), _EXPECTED
        except OSError:  # an unknown name, or a slow name server
            return None
        return None
