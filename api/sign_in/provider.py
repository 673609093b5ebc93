"""Calls the OpenID Connect provider: reads its metadata and keys, and trades codes for tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote_plus, urlencode, urlsplit

import httpx2
import orjson
from pydantic import BaseModel, ValidationError

from service.jobs.settings import LOOPBACK

if TYPE_CHECKING:  # with its cryptography it takes memory, which a service without sign-in spares
    import jwt

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Algorithms that need the provider's private key: neither ``none`` nor one with a shared secret."""
CLOCKS_DIFFER_S = 60
"""Seconds that the provider's clock may be ahead of, or behind, this one's."""
_REQUIRED = ("iss", "sub", "aud", "exp", "iat", "nonce")
_KEY_TYPES = ("RSA", "EC", "OKP")
_LONGEST_TOKEN = 100_000

KeySet = Mapping[str, Mapping[str, Any]]
"""Public keys of a provider by id, as JSON Web Keys."""


class InvalidToken(Exception):  # noqa: N818
    """The ID token proves no identity to this service."""


class UnknownSigningKey(InvalidToken):
    """The token names a key that the provider has not published, as far as is known here."""


@dataclass(frozen=True)
class Expected:
    """The issuer, client and sign-in that a token must name."""

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
    import jwt  # noqa: PLC0415 - as said above

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
    """Return the key that the token names, for the token's algorithm; a token without a key id needs a provider
    with only one key.
    """
    import jwt  # noqa: PLC0415 - as said above

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


_TIMEOUT_S = 10.0
_MOST_BYTES = 1 << 20
_METADATA_S = 3600.0
"""How long the provider's metadata and keys are used before they are fetched again."""
_STALE_S = 24 * 3600.0
"""How long they are used at most, while they cannot be fetched."""
_WAIT_S = 3.0
"""Longest wait for metadata that another thread fetches."""
_AWAY_S = 3.0
"""How long the provider is not asked again after it did not answer."""
_REFRESH_S = 10.0
"""Shortest time between two fetches of keys because of an unknown one."""


class ProviderUnavailable(Exception):  # noqa: N818
    """The provider does not answer, or not as OpenID Connect requires."""


class CodeRefused(Exception):  # noqa: N818
    """The provider does not accept the authorization code."""


class ProviderMetadata(BaseModel):
    """A provider's metadata (OpenID Connect Discovery 1.0)."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False


@dataclass(frozen=True)
class RelyingParty:
    """Identifies this service to the provider."""

    issuer: str
    client_id: str
    client_secret: str | None
    scopes: str


@dataclass(frozen=True)
class AuthorizationRequest:
    """A sign-in that is under way while the browser is at the provider."""

    state: str
    nonce: str
    verifier: str
    redirect_uri: str


@dataclass(frozen=True)
class _ProviderKeys:
    metadata: ProviderMetadata
    keys: KeySet
    at: float


class OpenIdProvider:
    """One provider. Safe to share between threads; calls block for its answers."""

    def __init__(self, party: RelyingParty) -> None:
        self._party = party
        self._lock = threading.Lock()
        self._known: _ProviderKeys | None = None
        self._refreshed = -math.inf
        """When keys were last fetched because of an unknown one."""
        self._away = (-math.inf, "")
        """When the provider last did not answer, and what was said of it."""
        on_this_host = urlsplit(party.issuer).hostname in LOOPBACK
        self._schemes = ("https", "http") if on_this_host else ("https",)
        self._http = httpx2.Client(timeout=_TIMEOUT_S, follow_redirects=False, trust_env=not on_this_host)

    def authorization_url(self, request: AuthorizationRequest) -> str:
        """Return where the browser goes to sign in. Raises :class:`ProviderUnavailable`."""
        challenge = base64.urlsafe_b64encode(hashlib.sha256(request.verifier.encode()).digest()).rstrip(b"=").decode()
        query = {
            "response_type": "code",
            "client_id": self._party.client_id,
            "redirect_uri": request.redirect_uri,
            "scope": self._party.scopes,
            "state": request.state,
            "nonce": request.nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        endpoint = self._current().metadata.authorization_endpoint
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    def is_issuer(self, answered: str | None) -> bool:
        """Return whether an answer to an authorization request came from this provider (RFC 9207)."""
        if answered is None:
            return not self._current().metadata.authorization_response_iss_parameter_supported
        return answered == self._party.issuer

    def claims(self, code: str, request: AuthorizationRequest) -> dict[str, Any]:
        """Trade an authorization code for the claims of its ID token. Raises :class:`ProviderUnavailable`,
        :class:`CodeRefused` and :class:`~api.sign_in.provider.InvalidToken`.
        """
        known = self._current()
        token = self._trade(known.metadata, code, request)
        expected = Expected(self._party.issuer, self._party.client_id, request.nonce)
        try:
            return verified_claims(token, known.keys, expected)
        except UnknownSigningKey:
            return verified_claims(token, self._current(but_not=known).keys, expected)

    def _trade(self, metadata: ProviderMetadata, code: str, request: AuthorizationRequest) -> str:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": request.redirect_uri,
            "code_verifier": request.verifier,
        }
        headers, secret = {}, self._party.client_secret
        if secret is not None and "client_secret_basic" in metadata.token_endpoint_auth_methods_supported:
            pair = f"{quote_plus(self._party.client_id)}:{quote_plus(secret)}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": self._party.client_id} | ({"client_secret": secret} if secret is not None else {})
        answer = self._ask("POST", metadata.token_endpoint, data=form, headers=headers)
        if not isinstance(answer.get("id_token"), str):
            raise ProviderUnavailable("the provider's answer has no ID token")
        return str(answer["id_token"])

    def _current(self, but_not: _ProviderKeys | None = None) -> _ProviderKeys:
        """Return the provider's metadata and keys, fetched again if they are old or are those of ``but_not``: a
        person who signs in just after the provider changed its keys must not be refused. While they cannot be fetched,
        old ones are used for a day.
        """
        known = self._known
        if not self._lock.acquire(timeout=_WAIT_S if known is None or but_not is not None else 0.0):
            if known is None or known is but_not or time.monotonic() - known.at > _STALE_S:
                raise ProviderUnavailable("the provider's metadata is being fetched; try again in a moment")
            return known
        try:
            return self._fetch_if_needed(but_not)
        finally:
            self._lock.release()

    def _fetch_if_needed(self, but_not: _ProviderKeys | None) -> _ProviderKeys:
        known, now = self._known, time.monotonic()
        refreshes = but_not is not None and known is but_not and now - self._refreshed > _REFRESH_S
        if known is not None and not refreshes and now - known.at <= _METADATA_S:
            return known
        try:
            self._known = self._fetch_keys(now)
            self._refreshed = now if refreshes else self._refreshed
        except ProviderUnavailable:
            is_away = self._away[0] >= now - _AWAY_S  # and not one whose answer is refused
            if known is None or refreshes or now - known.at > _STALE_S or not is_away:
                raise
            return known
        return self._known

    def _fetch_keys(self, now: float) -> _ProviderKeys:
        url = f"{self._party.issuer.rstrip('/')}/.well-known/openid-configuration"
        try:
            metadata = ProviderMetadata.model_validate(self._ask("GET", url))
        except ValidationError as error:
            fields = ", ".join(".".join(map(str, each["loc"])) for each in error.errors())
            raise ProviderUnavailable(f"the provider's metadata is not complete: {fields}") from None
        if metadata.issuer != self._party.issuer:
            raise ProviderUnavailable(f"{url} is about the issuer {metadata.issuer[:200]!r}, another one")
        for endpoint in (metadata.authorization_endpoint, metadata.token_endpoint, metadata.jwks_uri):
            if endpoint.partition(":")[0].lower() not in self._schemes:
                raise ProviderUnavailable(f"the provider's endpoint {endpoint[:200]!r} is not https")
        return _ProviderKeys(metadata, key_set(self._ask("GET", metadata.jwks_uri)), now)

    def _ask(self, method: Literal["GET", "POST"], url: str, **options: Any) -> dict[str, Any]:
        """Return the JSON object of an answer. For a moment after metadata or keys did not come, they are not asked
        for: threads would wait. A code is traded in any case: what became of another's says nothing of it.
        """
        since, told = self._away
        if method == "GET" and time.monotonic() - since <= _AWAY_S:
            raise ProviderUnavailable(told)
        try:
            return self._request(method, url, **options)
        except ProviderUnavailable as error:
            if method == "GET":
                self._away = (time.monotonic(), str(error))
            raise

    def _request(self, method: Literal["GET", "POST"], url: str, **options: Any) -> dict[str, Any]:
        """Return the JSON object of an answer; no more than the limit is read."""
        try:
            with self._http.stream(method, url, **options) as response:
                body = b""
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > _MOST_BYTES:
                        raise ProviderUnavailable(f"the answer of {url} is larger than {_MOST_BYTES} bytes")
        except (httpx2.RequestError, httpx2.InvalidURL, UnicodeError) as error:  # also what no request can have
            raise ProviderUnavailable(f"{url} does not answer: {error or type(error).__name__}") from None
        if method == "POST" and response.status_code in (400, 401):
            raise CodeRefused("the provider refuses the code of this sign-in, or this service's credentials")
        try:
            answer = orjson.loads(body) if response.status_code == 200 else None
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise ProviderUnavailable(f"{url} answers {response.status_code}, or no JSON object")
        return answer
