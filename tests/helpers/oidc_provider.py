"""An OpenID Connect provider on the loopback that tests tell what to answer, wrong things too."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from http_receiver import Reply, Request, listening

CLIENT_ID, CLIENT_SECRET = "trivet", "s3cret with spaces & signs"


@dataclass(frozen=True)
class SigningKey:
    """A key of the provider, by its id."""

    kid: str
    private: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def public(self) -> dict[str, Any]:
        entry: dict[str, Any] = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self.private.public_key()))
        return {**entry, "kid": self.kid, "use": "sig", "alg": "ES256"}

    def sign(self, claims: dict[str, Any], **header: Any) -> str:
        return jwt.encode(claims, self.private, algorithm="ES256", headers={"kid": self.kid, **header})


@dataclass
class LocalProvider:
    """What it answers may be changed between calls: ``claims`` are those of every token, ``token`` writes it."""

    issuer: str = ""
    key: SigningKey = field(default_factory=lambda: SigningKey("first"))
    published: list[SigningKey] = field(default_factory=list)
    claims: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    token: Callable[[dict[str, Any]], str] | None = None
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    asked_for_keys: int = 0

    def authorize(self, url: str) -> dict[str, str]:
        """Sign somebody in who was sent to ``url``; return what the browser comes back with."""
        asked = dict(parse_qsl(urlsplit(url).query))
        assert url.startswith(f"{self.issuer}/authorize?")
        assert (asked["response_type"], asked["client_id"]) == ("code", CLIENT_ID)
        assert asked["code_challenge_method"] == "S256"
        code = secrets.token_urlsafe(8)
        self.codes[code] = asked
        return {"code": code, "state": asked["state"]}

    def describe(self) -> dict[str, Any]:
        own = {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
        }
        return own | self.metadata

    def trade(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        asked = self.codes.pop(form.get("code", ""), None)
        pair = "trivet:s3cret+with+spaces+%26+signs"
        if authorization != f"Basic {base64.b64encode(pair.encode()).decode()}":
            return 401, {"error": "invalid_client"}
        if asked is None or form.get("redirect_uri") != asked["redirect_uri"]:
            return 400, {"error": "invalid_grant"}
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
        if challenge.decode() != asked["code_challenge"]:
            return 400, {"error": "invalid_grant"}
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "sub": "1",
            "aud": CLIENT_ID,
            "iat": now,
            "exp": now + 300,
            "nonce": asked["nonce"],
        }
        claims |= self.claims
        write = self.token or self.key.sign
        return 200, {"id_token": write({name: value for name, value in claims.items() if value is not None})}


@contextmanager
def providing() -> Iterator[LocalProvider]:
    """Run a provider that knows one person."""
    provider = LocalProvider()

    def answer(request: Request) -> Reply:
        if request.method == "POST":
            form = {name: values[0] for name, values in parse_qs(request.body.decode()).items()}
            status, answered = provider.trade(form, request.headers.get("authorization", ""))
            return Reply.of(answered, status)
        if request.path == "/.well-known/openid-configuration":
            return Reply.of(provider.describe())
        if request.path == "/keys":
            provider.asked_for_keys += 1
            return Reply.of({"keys": [key.public for key in provider.published or [provider.key]]})
        return Reply.of({}, 404)

    with listening(answer) as provider.issuer:
        yield provider
