"""Keeps the sessions of the dashboard, which a browser has instead of an API key.

A session has two secrets. One is in a cookie, which the browser also sends to other servers on this host, since
cookies ignore ports. The other stays with the pages of the service's own origin, port included, and they send it
along; neither suffices alone. Only digests are kept, for as long as the session may live.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from dataclasses import dataclass

import orjson

from service.jobs.records import ApiKey
from service.jobs.store import stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.keys import ApiKeys, Credential
from service.jobs.store.keyspace import SESSION, SESSION_TICKET, SIGN_IN_FLOW, SIGN_INS

_TICKET_S = 300
"""How long a ticket admits to its path, for a download or an event stream that is reopened."""


@dataclass(frozen=True)
class SessionSecrets:
    """Holds the two secrets of a browser's session: the cookie's value, and the one that pages send in a header."""

    cookie: str
    page: str


@dataclass(frozen=True)
class Sessions:
    """Sessions end after ``idle_s`` without use, at the age of ``longest_s``, at sign-out, and with their key."""

    client: BrokerClient
    keys: ApiKeys
    idle_s: float
    longest_s: float

    def begin(self, key: ApiKey) -> SessionSecrets:
        made = SessionSecrets(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        stubs.begin_session(
            self.client, _digest(made.cookie), _digest(made.page), key.id, _ms(self.idle_s), _ms(self.longest_s)
        )
        return made

    def resume(
        self, cookie: str, *, page: str = "", ticket: str = "", path: str = "", is_use: bool = True
    ) -> ApiKey | None:
        """Return the session's key if ``page`` is the session's other secret, or ``ticket`` was given for ``path``. The
        session lives on from here if somebody uses it.
        """
        idle_ms = _ms(self.idle_s) if is_use else 0
        found = stubs.use_session(
            self.client, _digest(cookie), _digest(page), ticket and _digest(ticket), path, idle_ms
        )
        return self.keys.used(*found) if found else None

    def ticket(self, cookie: str, path: str) -> str:
        """Return a ticket that admits the session to ``path`` without the page's secret, for :data:`_TICKET_S`
        seconds: links and event streams cannot send a header.
        """
        ticket = secrets.token_urlsafe(32)
        name = SESSION_TICKET(_digest(cookie), _digest(ticket))
        self.client.call("SET", name, path, "EX", _TICKET_S)
        return ticket

    def credential(self, key: ApiKey, cookie: str) -> Credential:
        """Return the key or session behind a request's cookie."""
        return Credential(key.id, _digest(cookie))

    def end(self, cookie: str) -> ApiKey | None:
        """End a session, at once, and return its key; ``None`` if it is over already."""
        name = SESSION(_digest(cookie))
        key_id = self.client.call("HGET", name, "key")
        return self.keys.find(key_id) if self.client.call("DEL", name) else None


def _digest(secret: str) -> str:
    """Hash a secret that cannot be guessed, and so needs no salt."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


ALLOWED = 10
WINDOW_S = 60.0


@dataclass(frozen=True)
class SignIns:
    """An address is told why it is refused :data:`ALLOWED` times in :data:`WINDOW_S` seconds, and then to wait."""

    client: BrokerClient

    def wait_s(self, address: str) -> int:
        """Return whole seconds until this address may try again; 0 when it may now."""
        count, left = self.client.call("GET", SIGN_INS(address)), self.client.call("PTTL", SIGN_INS(address))
        if int(count or 0) < ALLOWED:
            return 0
        return max(math.ceil(int(left) / 1000), 1)

    def refused(self, address: str) -> None:
        """Count a try with a wrong key."""
        stubs.count_within(self.client, SIGN_INS(address), round(WINDOW_S * 1000))


FLOW_S = 600
"""How long a sign-in at the provider may take."""


@dataclass(frozen=True)
class SignInFlow:
    """A sign-in that has begun. ``state`` goes to the provider and comes back; ``browser`` stays in a cookie of
    the browser that began it, so that a sign-in cannot be completed in another person's browser.
    """

    state: str
    browser: str
    nonce: str
    verifier: str


@dataclass(frozen=True)
class SignInFlows:
    """A flow is taken once, by the browser that began it, within :data:`FLOW_S` seconds."""

    client: BrokerClient

    def begin(self) -> SignInFlow:
        """Begin a sign-in, with new secrets."""
        flow = SignInFlow(*(secrets.token_urlsafe(32) for _ in range(4)))
        kept = {"browser": _digest(flow.browser), "nonce": flow.nonce, "verifier": flow.verifier}
        self.client.call("SET", SIGN_IN_FLOW(_digest(flow.state)), orjson.dumps(kept), "EX", FLOW_S)
        return flow

    def take(self, state: str, browser: str) -> SignInFlow | None:
        """Return the flow of a ``state`` and forget it; ``None`` if there is none, or another browser began it."""
        text = self.client.call("GETDEL", SIGN_IN_FLOW(_digest(state)))
        if text is None:
            return None
        flow = SignInFlow(state, **orjson.loads(text))
        return flow if hmac.compare_digest(flow.browser, _digest(browser)) else None
