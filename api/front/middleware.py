"""Checks the Host header of every request, and sets the security headers of every response, whoever wrote it, and the
header about a key's near expiry.

A page of another site can make its own name lead to this machine (DNS rebinding); the browser then takes the service
for a part of that site. So only known names are answered. An address needs no check: no site can have another's
address as its name.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from functools import lru_cache

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.callers import EXPIRY_HEADER
from api.front.errors import plain_detail
from api.requests import respond
from api.server import HttpMiddleware
from service.jobs.host import ENV_PREFIX
from service.jobs.settings import LOOPBACK, Settings
from service.jobs.text import set_log_fields

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
}
_HSTS = "max-age=31536000"
_RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
"""The headers as they are sent, made once for all answers."""


class Hardening(HttpMiddleware):
    """Adds the security headers to every answer, as the innermost middleware; a header that an answer sets itself
    stays.
    """

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})
        replaced: int | None = None

        async def send_hardened(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if message["status"] >= 400 and headers.get("content-type", "").startswith("text/plain"):
                    replaced = message["status"]
                    await _problem(scope, receive, send, replaced, headers)
                    return
                _harden(scope, headers)
            elif replaced is not None:
                return
            await send(message)

        await self._app(scope, receive, send_hardened)


async def _problem(scope: Scope, receive: Receive, send: Send, status: int, headers: MutableHeaders) -> None:
    """Send a library's plain-text error (a body too large, a bad range) as a problem."""
    kept = {name: headers[name] for name in ("allow", "content-range", "retry-after") if name in headers}
    response = respond(status, plain_detail(status, scope), headers=kept)
    _harden(scope, response.headers)
    await response(scope, receive, send)


def _harden(scope: Scope, headers: MutableHeaders) -> None:
    present = {name for name, _ in headers.raw}
    headers.raw.extend(header for header in _RAW_HEADERS if header[0] not in present)
    if (expires := scope["state"].get("key_expires")) is not None:
        headers[EXPIRY_HEADER] = expires.isoformat(timespec="seconds")
    if scope["scheme"] == "https":
        headers.setdefault("Strict-Transport-Security", _HSTS)


_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]\s]+)(?::\d*)?")
"""A host and its port."""


def known_names(settings: Settings) -> frozenset[str]:
    """Return the names of this service: those of the setting, ``localhost``, and the names of the bound address."""
    own = {settings.host.lower()} | (set() if settings.host in LOOPBACK else {socket.gethostname().lower()})
    return frozenset({"localhost", *own, *settings.allowed_host_names})


@lru_cache(1024)
def is_known(host: str, names: frozenset[str]) -> bool:
    """Return whether a ``Host`` header names this service: by an address, one of ``names``, or below one like
    ``*.site``.
    """
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


_ONCE = ("host", "authorization", "content-type", "content-encoding", "idempotency-key")
"""Headers of which a proxy in front may use another one than the service, where there are two."""


class PlainHeads(HttpMiddleware):
    """Refuses requests that ask for a host of another name, that say a header twice, or whose body is compressed: it
    would be read, and an upload kept, as it is.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        super().__init__(app)
        self._names = names

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope))
        await (self._app if refusal is None else respond(*refusal))(scope, receive, send)

    def _refusal(self, headers: Headers) -> tuple[int, str] | None:
        if (twice := next((name for name in _ONCE if len(headers.getlist(name)) > 1), None)) is not None:
            return 400, f"the request has more than one header {twice.title()}"
        host, encoding = headers.get("host", ""), headers.get("content-encoding") or "identity"
        if not is_known(host, self._names):
            return 421, f"this service is not called {host[:200]!r}; its names are set by {ENV_PREFIX}ALLOWED_HOSTS"
        if encoding.lower() != "identity":
            return 415, f"the body has the Content-Encoding {encoding[:200]!r}; send it without one"
        return None


REQUEST_ID_HEADER = "X-Request-ID"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestIds(HttpMiddleware):
    """Names each request: by ``X-Request-ID`` from its client or a proxy, or by a new id if that is not a plain
    word of at most 64 characters. The answer, the log lines meanwhile and any problem have the name.
    """

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        name = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        set_log_fields(request_id=name)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault(REQUEST_ID_HEADER, name)
            await send(message)

        await self._app(scope, receive, send_named)
