"""API keys: shown once, kept as a digest, revoked at once."""

from __future__ import annotations

from typing import Any

import pytest
import redis as redis_py
from store_builders import at_once
from store_invariants import Snapshot

from service.jobs.records import NotFound, Rejected
from service.jobs.store import Store
from service.jobs.store.keyspace import API_KEYS, PEPPER


def test_a_secret_verifies_as_its_key(store: Store) -> None:
    key, secret = store.keys.create("ci", ["read", "submit", "read"])
    assert secret.startswith(f"tvt_{key.id}_")
    assert len(secret.rpartition(key.id + "_")[2]) >= 43
    found = store.keys.verify(secret)
    assert found is not None
    assert (found.id, found.name, found.scopes) == (key.id, "ci", ("read", "submit"))


def test_neither_secret_nor_plain_digest_is_kept(store: Store, redis: redis_py.Redis) -> None:
    _, secret = store.keys.create("ci", ["read"])
    random = secret.split("_", 2)[2].encode()
    entries = b"".join(redis.hgetall(API_KEYS()).values()) + b"".join(redis.hgetall(API_KEYS()))
    assert random not in entries
    assert len(bytes.fromhex(redis.get(PEPPER()).decode())) == 32
    assert Snapshot(redis).strays() == []


def test_another_pepper_makes_digests_useless(store: Store, redis: redis_py.Redis) -> None:
    _, secret = store.keys.create("ci", ["read"])
    redis.set(PEPPER(), "00" * 32)
    assert store.keys.verify(secret) is None


@pytest.mark.parametrize(
    "change", ["", "nonsense", "tvt_", "tvt__", "tvt_{id}_", "{secret}x", "xxx_{id}_{random}", "tvt_{other}_{random}"]
)
def test_anything_else_does_not_verify(store: Store, change: str) -> None:
    key, secret = store.keys.create("ci", ["read"])
    other, _ = store.keys.create("other", ["admin"])
    random = secret.split("_", 2)[2]
    assert store.keys.verify(change.format(id=key.id, other=other.id, secret=secret, random=random)) is None
    assert store.keys.verify("tvt_ünïcode_\x00") is None


def test_a_revoked_key_stops_at_once(store: Store) -> None:
    key, secret = store.keys.create("ci", ["read"])
    store.keys.revoke(key.id)
    assert store.keys.verify(secret) is None
    assert store.keys.list() == []
    with pytest.raises(NotFound):
        store.keys.revoke(key.id)


def test_use_is_noted_once_a_minute(store: Store, redis: redis_py.Redis) -> None:
    key, secret = store.keys.create("ci", ["read"])
    assert [each.last_used_at for each in store.keys.list()] == [None]
    store.keys.verify(secret)
    (listed,) = store.keys.list()
    assert listed.id == key.id
    assert listed.last_used_at is not None
    assert abs((listed.last_used_at - listed.created_at).total_seconds()) < 60
    store.keys.verify(secret)
    assert store.keys.list() == [listed]


@pytest.mark.parametrize("scopes", [[], ["root"], ["read", "root"]])
def test_bad_scopes_are_refused(store: Store, scopes: Any) -> None:
    with pytest.raises(Rejected, match="scopes"):
        store.keys.create("ci", scopes)
    assert store.keys.list() == []


def test_the_admin_key_is_made_once_however_many_ask(store: Store) -> None:
    store.keys.create("reader", ["read"])
    (secret,) = [each for each in at_once(store.keys.ensure_admin) if each is not None]
    key = store.keys.verify(secret)
    assert key is not None
    assert key.scopes == ("admin",)


def test_without_any_admin_left_a_new_one_is_made(store: Store) -> None:
    assert store.keys.ensure_admin() is not None
    (key,) = store.keys.list()
    store.keys.revoke(key.id)
    assert store.keys.ensure_admin() is not None
