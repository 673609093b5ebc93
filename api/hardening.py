"""What every answer carries, whoever wrote it: security headers, and problems instead of plain-text errors."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import problems
from api.errors import plain_detail

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
HSTS = "max-age=31536000"


class Hardening:
    """Innermost defaults: a header that an answer sets itself stays as it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
    response = problems.respond(status, plain_detail(status, scope["method"]), headers=kept)
    _harden(scope, response.headers)
    await response(scope, receive, send)


def _harden(scope: Scope, headers: MutableHeaders) -> None:
    for name, value in SECURITY_HEADERS.items():
        headers.setdefault(name, value)
    if scope["scheme"] == "https":
        headers.setdefault("Strict-Transport-Security", HSTS)
