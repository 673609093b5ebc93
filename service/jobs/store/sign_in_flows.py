"""Keeps sign-ins that have begun: what this service remembers while a browser is at the OpenID Connect provider."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

import orjson

from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import SIGN_IN_FLOW

FLOW_S = 600
"""How long somebody may take to sign in at the provider."""


@dataclass(frozen=True)
class SignInFlow:
    """A sign-in that has begun. ``state`` goes to the provider and comes back; ``browser`` stays in a cookie of the
    browser that began it, so that nobody's sign-in can be slipped to somebody else's browser.
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
        """Return the flow of a ``state`` and forget it; ``None`` where there is none, or another browser began it."""
        text = self.client.call("GETDEL", SIGN_IN_FLOW(_digest(state)))
        if text is None:
            return None
        flow = SignInFlow(state, **orjson.loads(text))
        return flow if hmac.compare_digest(flow.browser, _digest(browser)) else None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
