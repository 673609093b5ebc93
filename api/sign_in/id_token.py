"""Verifies ID tokens (OpenID Connect Core 1.0, section 3.1.3.7)."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures by a key that only the provider has: no ``none``, and none by a secret that this service has too."""
CLOCKS_DIFFER_S = 60
"""Seconds that the provider's clock may be ahead of, or behind, this one's."""
_REQUIRED = ("iss", "sub", "aud", "exp", "iat", "nonce")
_KEY_TYPES = ("RSA", "EC", "OKP")
_LONGEST_TOKEN = 100_000

KeySet = Mapping[str, Mapping[str, Any]]
"""Public keys of a provider by id, as JSON Web Keys."""


class InvalidToken(Exception):  # noqa: N818
    """The ID token proves nobody's identity to this service."""


class UnknownSigningKey(InvalidToken):
    """The token names a key that the provider has not published, as far as is known here."""


@dataclass(frozen=True)
class Expected:
    """What a token must have been issued by, for whom, and for which sign-in."""

    issuer: str
    client_id: str
    nonce: str


def key_set(published: Mapping[str, Any]) -> KeySet:
    """Return the keys for signatures that a provider publishes (RFC 7517), by id."""
    listed = published.get("keys")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    usable = [entry for entry in entries if entry.get("use", "sig") == "sig" and entry.get("kty") in _KEY_TYPES]
    return {str(entry.get("kid", f"number {index}")): entry for index, entry in enumerate(usable)}


def verified_claims(token: str, keys: KeySet, expected: Expected) -> dict[str, Any]:
    """Return the claims of a token that one of ``keys``, by id, has signed. Raises :class:`InvalidToken`."""
    if len(token) > _LONGEST_TOKEN:
        raise InvalidToken("the ID token is too long")
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            _signing_key(token, keys),
            algorithms=list(ALGORITHMS),
            audience=expected.client_id,
            issuer=expected.issuer,
            leeway=CLOCKS_DIFFER_S,
            options={"require": list(_REQUIRED)},
        )
    except jwt.PyJWTError as error:
        raise InvalidToken(f"the ID token is not valid: {error}") from None
    _check_party(claims, expected.client_id)
    if not hmac.compare_digest(str(claims["nonce"]).encode(), expected.nonce.encode()):
        raise InvalidToken("the ID token is that of another sign-in: its nonce differs")
    return claims


def _signing_key(token: str, keys: KeySet) -> jwt.PyJWK:
    """Return the key that the token names, for the token's algorithm; a token that names none needs a provider that has
    only one.
    """
    header = jwt.get_unverified_header(token)
    algorithm, key_id = header.get("alg"), header.get("kid")
    if algorithm not in ALGORITHMS:
        raise InvalidToken(f"the ID token is signed by {str(algorithm)[:20]!r}, which is not accepted")
    entry = next(iter(keys.values())) if key_id is None and len(keys) == 1 else keys.get(str(key_id))
    if entry is None:
        raise UnknownSigningKey("the ID token is signed by a key that the provider does not publish")
    if entry.get("alg", algorithm) != algorithm:
        raise InvalidToken("the ID token is signed by another algorithm than its key is for")
    return jwt.PyJWK(dict(entry), algorithm=algorithm)


def _check_party(claims: Mapping[str, Any], client_id: str) -> None:
    """Check that a token for several audiences was issued to this service."""
    audiences, party = claims["aud"], claims.get("azp")
    if party is None and (isinstance(audiences, str) or len(audiences) == 1):
        return
    if party != client_id:
        raise InvalidToken("the ID token was issued to another client")
