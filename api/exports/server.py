"""Connects to the server of an export, at an address that was checked."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from api.deliveries import WebhookAddress, token_for, vetted
from service.jobs.settings import Network

_ANSWER_S = 30.0
_MOST_ANSWER = 1 << 20
EVERYWHERE: Sequence[Network] = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
"""Addresses to which the operator's own URLs may lead."""


class ExportFailed(Exception):  # noqa: N818
    """An export cannot be made now; the message says why."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    def check(self) -> None:
        """Raise :class:`ExportFailed` unless the status is a success."""
        if not 200 <= self.status < 300:
            raise ExportFailed(f"the server answered {self.shown}")

    @property
    def shown(self) -> str:
        """Return the status and the beginning of the server's answer."""
        return f"{self.status} {self.body[:200].decode(errors='replace')}".strip()


class Limit:
    """Ends exports that take too long or whose process stops. Threads may share it."""

    def __init__(self, seconds: float) -> None:
        self._deadline, self._seconds = time.monotonic() + seconds, seconds
        self.is_stopping = threading.Event()

    def check(self) -> None:
        """Raise :class:`ExportFailed` if the export must end."""
        if self.is_stopping.is_set():
            raise ExportFailed("the service is being restarted")
        if time.monotonic() > self._deadline:
            raise ExportFailed(f"it took longer than {self._seconds:.0f} s")


@dataclass(frozen=True)
class ExportServer:
    """One server; use it as a context manager. No redirect is followed, and no proxy is used."""

    url: str
    address: WebhookAddress
    client: httpx2.Client
    limit: Limit
    token: str | None = None

    def __enter__(self) -> ExportServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def send(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: Iterable[bytes] | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request to ``path`` below the server's URL. Raises :class:`ExportFailed` when there is no time."""
        self.limit.check()
        identity = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        request = self.client.build_request(
            method,
            self.address.url + urlsplit(self.url).path.rstrip("/") + path,
            json=json,
            content=None if content is None else self._limit_chunks(content),
            params=query,
            headers={"host": self.address.authority, "user-agent": "Trivet", **identity, **(headers or {})},
        )
        request.extensions["sni_hostname"] = self.address.host
        answer = self.client.send(request, stream=True)
        try:
            body = b""
            for chunk in answer.iter_bytes():
                body += chunk
                if len(body) > _MOST_ANSWER:
                    raise httpx2.DecodingError(f"an answer of more than {_MOST_ANSWER} bytes")
            return Answer(answer.status_code, body)
        finally:
            answer.close()

    def _limit_chunks(self, content: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in content:
            self.limit.check()
            yield chunk


def required(server: ExportServer | None) -> ExportServer:
    """Return the server of a target that cannot do without one."""
    if server is None:
        raise ExportFailed("no server is named")
    return server


def connect(url: str, allowed: Sequence[Network], tokens: Mapping[str, str], limit: Limit) -> ExportServer:
    """Return the server of a URL, whose name is resolved once.

    Not for a thread that runs an event loop. Raises :class:`~api.deliveries.ForbiddenTarget` for an address that is
    forbidden to webhooks too.
    """
    address = asyncio.run(vetted(url, allowed))
    client = httpx2.Client(trust_env=False, follow_redirects=False, timeout=_ANSWER_S)
    return ExportServer(url, address, client, limit, token_for(url, tokens))
