"""Keeps API keys: 256-bit secrets, stored only as peppered digests.

A digest without salt is right for secrets that cannot be guessed; the pepper (random, made once, kept in Redis)
makes a leaked digest useless elsewhere.
"""

from __future__ import annotations

import hmac
import math
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import orjson

from service.jobs.accounts import DEFAULT_PROJECT, PROJECT_PATTERN, ROLES, SCOPES, Person, Scope
from service.jobs.records import ApiKey, Conflict, NotFound, Problem, Rejected, ServiceAccount
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.decode import json_of
from service.jobs.store.keyspace import API_KEYS, API_KEYS_DISABLED, API_KEYS_USED, PEPPER

_USE_RESOLUTION_S = 60.0
_CLOCKS_DIFFER = timedelta(minutes=5)
"""Tolerance for a client that asks for the longest life by its own clock."""
_LAST_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
_LAST_MS = round(_LAST_END.timestamp() * 1000)
"""A later end could be written, but not read again; earlier versions wrote some."""
_NO_ENTRY = orjson.dumps({"id": "0" * 16, "name": "", "scopes": ["read"], "digest": "0" * 64, "created_at": 0})
"""Stands in for the entry of a key that does not exist."""
_NO_DIGEST = ""
"""The digest of no secret."""


@dataclass(frozen=True)
class Credential:
    """Names the key that admitted a request, and the session that spoke for it, if any."""

    key_id: str
    session: str = ""
    """The digest under which the session is stored."""

    def __str__(self) -> str:
        return f"{self.key_id}:{self.session}" if self.session else self.key_id


@dataclass(frozen=True)
class ApiKeys:
    """Keeps the service's API keys. A secret is ``tvt_<id>_<random>`` and is shown once, when it is made."""

    client: BrokerClient
    longest_s: float | None = None

    def create(
        self, name: str, scopes: Sequence[Scope], project: str | None = None, *, expires_at: datetime | None = None
    ) -> tuple[ApiKey, str]:
        """Make a key of a project; return it and its secret.

        Without a project, a key with the scope ``admin`` is an operator's, and any other one belongs to the default
        project. The key's owner becomes a member of the project, in the role of the greatest scope. Raises
        :class:`Rejected` for no scopes, or unknown ones, for an invalid project name, and for an end that has passed
        or is later than ``longest_s`` allows; :class:`NotFound` if there is no such project, and :class:`Conflict` if
        its owner is a member in a lesser role, or a service account.
        """
        check_grant(scopes, project)
        return self._enter(*_new(name, scopes, project or project_of(scopes), self._end(expires_at)))

    def create_for(self, account: ServiceAccount, *, expires_at: datetime | None = None) -> tuple[ApiKey, str]:
        """Make a key of a service account; return it and its secret. Raises :class:`NotFound`,
        :class:`Conflict` for a disabled account, and :class:`Rejected` like :meth:`create`.
        """
        key, secret = _new(account.name, account.scopes, account.project, self._end(expires_at))
        return self._enter(key.model_copy(update={"holder": "account"}), secret)

    def _enter(self, key: ApiKey, secret: str) -> tuple[ApiKey, str]:
        stubs.enter_key(
            self.client,
            key_id=key.id,
            entry=self._entry(key, secret),
            project=key.project or "",
            owner=key.name,
            role=key.role,
            holder=key.holder,
        )
        return key, secret

    def verify(self, secret: str) -> ApiKey | None:
        """Return the key that this secret belongs to, if any.

        One round trip, one digest and one comparison, whatever is wrong with it: how long a refusal takes does not
        tell which keys exist.
        """
        entry, used, pepper, role = stubs.look_up_key(self.client, _id_of(secret))
        known = orjson.loads(entry or _NO_ENTRY)
        matches = hmac.compare_digest(_digest(secret, pepper), known["digest"])
        return self.used(entry, used, role) if matches and entry and not _has_expired(known) else None

    def used(self, entry: str, last_used: str, role: str) -> ApiKey | None:
        """Return the key that is stored as ``entry``, with at most the rights of its owner's ``role`` in its project
        (``any`` if the key alone decides); ``None`` if the owner is no member.

        Its use is noted at most once a minute: not every read should cause a write.
        """
        if not role:
            return None
        key = _stored_key(entry, last_used, role)
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

    def admit(self, person: Person, *, life_s: float) -> ApiKey:
        """Enter a person who signed in through the OpenID Connect provider, and return the person's key, which
        has no secret, expires after ``life_s``, and is the same one at every sign-in. From now on this sign-in
        decides the person's rights, as a member of the project and in earlier sessions too; a membership that
        the previous sign-in gave in another project ends. Raises :class:`Conflict` if the name is another's,
        and :class:`NotFound` if there is no such project.
        """
        former = self.find(person.id)
        now = decode.now()
        key = ApiKey(
            **asdict(person),
            created_at=former.created_at if former else now,
            expires_at=now + timedelta(seconds=life_s),
            holder="person",
        )
        stubs.admit_person(
            self.client,
            key_id=key.id,
            entry=_write_key(key, _NO_DIGEST),
            project=key.project or "",
            owner=key.name,
            role=key.role,
        )
        return key

    def find(self, key_id: str) -> ApiKey | None:
        entry = self.client.call("HGET", API_KEYS(), key_id)
        return None if entry is None else _api_key(orjson.loads(entry))

    def revoke(self, key_id: str) -> None:
        """Revoke a key; it stops working at once. Raises :class:`NotFound`."""
        if not self.client.call("HDEL", API_KEYS(), key_id):
            raise NotFound(f"there is no key {key_id}")
        self.client.call("HDEL", API_KEYS_USED(), key_id)
        self.client.call("SREM", API_KEYS_DISABLED(), key_id)

    def rotate(self, key_id: str, *, grace_s: float, expires_at: datetime | None = None) -> tuple[ApiKey, str]:
        """Make a key that replaces another: with the same owner, scopes and project.

        The old one works for ``grace_s`` more seconds, unless it expires before. Without an end, the new one gets as
        long a life as the old one had. Return it and its secret. Raises :class:`NotFound`, :class:`Conflict` for a
        key that has expired or was rotated before, and :class:`Rejected` like :meth:`create`.
        """
        known = self.client.call("HGET", API_KEYS(), key_id)
        if known is None:
            raise NotFound(f"there is no key {key_id}")
        entry = orjson.loads(known)
        if _has_expired(entry):
            raise Conflict(f"key {key_id} has expired; create another one")
        if entry.get("holder") == "person":
            raise Conflict(f"{key_id} is a person who signs in: there is no secret to rotate")
        if entry.get("successor"):
            raise Conflict(f"key {key_id} was rotated already; its successor is {entry['successor']}")
        successor, secret = self._successor(_api_key(entry), expires_at)
        end = min(entry.get("expires_at") or math.inf, math.floor((time.time() + grace_s) * 1000))
        stubs.rotate_key(
            self.client,
            key_id=key_id,
            known=known,
            entry=json_of({**entry, "expires_at": end, "successor": successor.id}),
            successor_id=successor.id,
            successor=self._entry(successor, secret),
        )
        return successor, secret

    def _successor(self, key: ApiKey, expires_at: datetime | None) -> tuple[ApiKey, str]:
        now = datetime.now(UTC)
        if expires_at is None and key.expires_at is not None:
            life = min(key.expires_at - key.created_at, _LAST_END - now)
            expires_at = now + (life if self.longest_s is None else min(life, timedelta(seconds=self.longest_s)))
        successor, secret = _new(key.name, key.scopes, key.project, self._end(expires_at))
        return successor.model_copy(update={"holder": key.holder}), secret

    def _end(self, asked: datetime | None) -> datetime | None:
        """Return when a key made now expires. Raises :class:`Rejected`."""
        now = datetime.now(UTC)
        latest = None if self.longest_s is None else now + timedelta(seconds=self.longest_s)
        if asked is None:
            return latest
        if asked <= now:
            raise Rejected([Problem("expires_at", "this time has passed", str(asked), f"a time after {now}")])
        if asked > _LAST_END:
            raise Rejected([Problem("expires_at", "this time is too late", str(asked), f"{_LAST_END} at the latest")])
        if latest is not None and asked > latest + _CLOCKS_DIFFER:
            message = "keys of this service do not last so long (TRIVET_MAX_KEY_DAYS)"
            raise Rejected([Problem("expires_at", message, str(asked), f"{latest} at the latest")])
        return asked

    def ensure_admin(self) -> str | None:
        """Make an operator's key unless one exists; return its secret, or ``None``. Safe to call concurrently."""
        key, secret = _new("admin", ("admin",), None, None)
        return secret if stubs.ensure_admin(self.client, key.id, self._entry(key, secret)) else None

    def ended(self, credentials: Sequence[Credential]) -> set[Credential]:
        """Return the credentials that are no longer valid."""
        ended = set(stubs.ended_credentials(self.client, *map(str, credentials))) if credentials else set()
        return {credential for credential in credentials if str(credential) in ended}

    def _entry(self, key: ApiKey, secret: str) -> str:
        return _write_key(key, _digest(secret, self._pepper()))

    def _pepper(self) -> str:
        if (text := self.client.call("GET", PEPPER())) is None:
            self.client.call("SET", PEPPER(), secrets.token_hex(32), "NX")
            text = self.client.call("GET", PEPPER())
        return str(text)


def _digest(secret: str, pepper: str) -> str:
    return hmac.digest(bytes.fromhex(pepper), secret.encode(), "sha256").hex()


def check_grant(scopes: Sequence[Scope], project: str | None) -> None:
    """Raise :class:`Rejected` for no scopes, or unknown ones, and for an invalid project name."""
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        raise Rejected([Problem("scopes", "not a set of scopes", list(scopes), f"some of {', '.join(SCOPES)}")])
    if project is not None and re.fullmatch(PROJECT_PATTERN, project) is None:
        raise Rejected([Problem("project", "not a name of a project", project, f"a match of {PROJECT_PATTERN}")])


def project_of(scopes: Sequence[Scope]) -> str | None:
    """Return the project of a key that names none: one from before there were projects."""
    return None if "admin" in scopes else DEFAULT_PROJECT


def _write_key(key: ApiKey, digest: str) -> str:
    """Return the entry of a key as JSON, times in milliseconds."""
    fields = key.model_dump(include={"id", "name", "scopes", "project", "holder"})
    created_at = round(key.created_at.timestamp() * 1000)
    expires_at = None if key.expires_at is None else round(key.expires_at.timestamp() * 1000)
    return json_of({**fields, "digest": digest, "created_at": created_at, "expires_at": expires_at})


def _has_expired(entry: dict[str, Any]) -> bool:
    """Return whether the time of day is past a key's end, as ``lua/lib/keys.lua`` does."""
    ends: int | None = entry.get("expires_at")
    return ends is not None and ends <= time.time() * 1000


def _new(name: str, scopes: Sequence[Scope], project: str | None, expires_at: datetime | None) -> tuple[ApiKey, str]:
    key = ApiKey(
        id=secrets.token_hex(8),
        name=name,
        scopes=tuple(dict.fromkeys(scopes)),
        project=project,
        created_at=decode.now(),
        expires_at=expires_at,
    )
    return key, f"tvt_{key.id}_{secrets.token_urlsafe(32)}"


def _within(role: str, key: ApiKey) -> ApiKey:
    if role not in ROLES:
        return key
    most = ROLES.index(role)
    scopes = tuple(scope for scope in key.scopes if SCOPES.index(scope) <= most) or (SCOPES[most],)
    return key.model_copy(update={"scopes": scopes})


@lru_cache(1024)
def _stored_key(entry: str, last_used: str, role: str) -> ApiKey:
    """Return the key of an entry, with at most the rights of a role. The broker is asked for all three each time."""
    return _within(role, _api_key(orjson.loads(entry) | {"last_used_at": last_used or None}))


def _id_of(secret: str) -> str:
    prefix, _, rest = secret.partition("_")
    return rest.partition("_")[0] if prefix == "tvt" else ""


def _api_key(entry: dict[str, Any]) -> ApiKey:
    used = entry.get("last_used_at")
    return ApiKey(
        id=entry["id"],
        name=entry["name"],
        scopes=tuple(entry["scopes"]),
        project=entry.get("project", project_of(entry["scopes"])),
        created_at=decode.moment(entry["created_at"]),
        last_used_at=None if used is None else decode.moment(used),
        expires_at=None if (ends := entry.get("expires_at")) is None else decode.moment(min(ends, _LAST_MS)),
        holder=entry.get("holder", "key"),
        successor=entry.get("successor"),
    )
