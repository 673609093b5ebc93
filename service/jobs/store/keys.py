"""Keeps API keys: 256-bit secrets, of which only a peppered digest is kept.

A digest without salt is right for secrets that cannot be guessed; the pepper (random, made once, kept in Redis)
makes a leaked digest useless elsewhere.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from service.jobs.records import ApiKey, NotFound, Problem, Rejected, Scope
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import API_KEYS, API_KEYS_USED, PEPPER

_SCOPES: tuple[Scope, ...] = ("read", "submit", "admin")
_USE_RESOLUTION_S = 60.0
_NO_ENTRY = orjson.dumps({"id": "0" * 16, "name": "", "scopes": ["read"], "digest": "0" * 64, "created_at": 0})
"""Stands in for the entry of a key that does not exist."""


@dataclass(frozen=True)
class Credential:
    """Names what a request was admitted by: a key, and the session that spoke for it, if any."""

    key_id: str
    session: str = ""
    """The digest that the session is stored under."""

    def __str__(self) -> str:
        return f"{self.key_id}:{self.session}" if self.session else self.key_id


@dataclass(frozen=True)
class ApiKeys:
    """Keeps the service's API keys. A secret is ``tvt_<id>_<random>`` and is shown once, when it is made."""

    client: BrokerClient

    def create(self, name: str, scopes: Sequence[Scope]) -> tuple[ApiKey, str]:
        """Make a key; return it and its secret. Raises :class:`Rejected` for no scopes, or unknown ones."""
        unknown = [scope for scope in scopes if scope not in _SCOPES]
        if unknown or not scopes:
            raise Rejected([Problem("scopes", "not a set of scopes", list(scopes), f"some of {', '.join(_SCOPES)}")])
        key, secret = _new(name, scopes)
        self.client.call("HSET", API_KEYS(), key.id, self._entry(key, secret))
        return key, secret

    def verify(self, secret: str) -> ApiKey | None:
        """Return the key that this secret belongs to, if any.

        One round trip, one digest and one comparison, whatever is wrong with it: how long a refusal takes does not
        tell which keys exist.
        """
        entry, used, pepper = stubs.look_up_key(self.client, _id_of(secret))
        known = orjson.loads(entry or _NO_ENTRY)
        matches = hmac.compare_digest(_digest(secret, pepper), known["digest"])
        return self.used(entry, used) if matches and entry else None

    def used(self, entry: str, last_used: str) -> ApiKey:
        """Return the key that is stored as ``entry`` and note its use, once a minute at most: reading requests should
        not all be writes.
        """
        key = _api_key(orjson.loads(entry) | {"last_used_at": last_used or None})
        now = time.time()
        if now - float(last_used or 0) / 1000 > _USE_RESOLUTION_S:
            self.client.call("HSET", API_KEYS_USED(), key.id, round(now * 1000))
        return key

    def list(self) -> list[ApiKey]:
        """List the keys, oldest first."""
        used = self.client.call("HGETALL", API_KEYS_USED())
        entries = [orjson.loads(text) for text in self.client.call("HVALS", API_KEYS())]
        keys = [_api_key(entry | {"last_used_at": used.get(entry["id"])}) for entry in entries]
        return sorted(keys, key=lambda key: (key.created_at, key.id))

    def revoke(self, key_id: str) -> None:
        """Revoke a key, which stops working at once. Raises :class:`NotFound`."""
        if not self.client.call("HDEL", API_KEYS(), key_id):
            raise NotFound(f"there is no key {key_id}")
        self.client.call("HDEL", API_KEYS_USED(), key_id)

    def ensure_admin(self) -> str | None:
        """Make an admin key unless one exists; its secret, or ``None``. Many may call this at once."""
        key, secret = _new("admin", ("admin",))
        return secret if stubs.ensure_admin(self.client, key.id, self._entry(key, secret)) else None

    def ended(self, credentials: Sequence[Credential]) -> set[Credential]:
        """Return those of the credentials that no longer admit anybody."""
        ended = set(stubs.ended_credentials(self.client, *map(str, credentials))) if credentials else set()
        return {credential for credential in credentials if str(credential) in ended}

    def _entry(self, key: ApiKey, secret: str) -> str:
        fields = {"id": key.id, "name": key.name, "scopes": key.scopes, "digest": _digest(secret, self._pepper())}
        return orjson.dumps(fields | {"created_at": round(key.created_at.timestamp() * 1000)}).decode()

    def _pepper(self) -> str:
        if (text := self.client.call("GET", PEPPER())) is None:
            self.client.call("SET", PEPPER(), secrets.token_hex(32), "NX")
            text = self.client.call("GET", PEPPER())
        return str(text)


def _digest(secret: str, pepper: str) -> str:
    return hmac.digest(bytes.fromhex(pepper), secret.encode(), "sha256").hex()


def _new(name: str, scopes: Sequence[Scope]) -> tuple[ApiKey, str]:
    key_id = secrets.token_hex(8)
    created = decode.moment(round(time.time() * 1000))
    key = ApiKey(id=key_id, name=name, scopes=tuple(dict.fromkeys(scopes)), created_at=created)
    return key, f"tvt_{key_id}_{secrets.token_urlsafe(32)}"


def _id_of(secret: str) -> str:
    prefix, _, rest = secret.partition("_")
    return rest.partition("_")[0] if prefix == "tvt" else ""


def _api_key(entry: dict[str, Any]) -> ApiKey:
    used = entry.get("last_used_at")
    return ApiKey(
        id=entry["id"],
        name=entry["name"],
        scopes=tuple(entry["scopes"]),
        created_at=decode.moment(entry["created_at"]),
        last_used_at=None if used is None else decode.moment(used),
    )
