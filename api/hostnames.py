"""By which names the service may be asked.

A page of another site can make its own name lead to this machine (DNS rebinding); the browser then takes the service
for a part of that site. So a name must be known here. An address needs no check: no site can have another's address as
its name.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api import problems
from service.jobs.settings import ENV_PREFIX, LOOPBACK, Settings

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]\s]+)(?::\d*)?")
"""A host and its port."""


def known_names(settings: Settings) -> frozenset[str]:
    """Return the names of this service: those of the setting, ``localhost``, and what the bound address is called."""
    own = {settings.host.lower()} | (set() if settings.host in LOOPBACK else {socket.gethostname().lower()})
    return frozenset({"localhost", *own, *settings.allowed_host_names})


def is_known(host: str, names: frozenset[str]) -> bool:
    """Whether a ``Host`` header names this service: by an address, one of ``names``, or below one like ``*.site``."""
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return False
    name = found[1].removesuffix(".")
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        parents = name.split(".")[1:]
        above = (f"*.{'.'.join(parents[index:])}" for index in range(len(parents)))
        return name in names or any(pattern in names for pattern in above)
    return True


class HostNames:
    """Refuses requests that ask for a host of another name."""

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if not is_known(host, self._names):
                detail = f"this service is not called {host[:200]!r}; its names are set by {ENV_PREFIX}ALLOWED_HOSTS"
                await problems.respond(421, detail)(scope, receive, send)
                return
        await self._app(scope, receive, send)
