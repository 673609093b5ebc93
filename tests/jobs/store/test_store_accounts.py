"""Service accounts: several keys of one owner, which stop together, and a name that nobody else has."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis as redis_py
from store_invariants import Snapshot

from service.jobs.accounts import Person
from service.jobs.records import Conflict, NotFound, Rejected
from service.jobs.store import Credential, Store


def test_keys_of_an_account_do_what_it_may(store: Store) -> None:
    with pytest.raises(NotFound, match="no project vision"):
        store.accounts.create("ci", ["submit"], "vision")
    store.projects.create("vision")
    account = store.accounts.create("ci", ["submit"], "vision")
    made = [store.keys.create_for(account) for _ in range(2)]
    for key, secret in made:
        found = store.keys.verify(secret)
        assert found is not None
        assert (found.name, found.scopes, found.project, found.holder) == ("ci", ("submit",), "vision", "account")
        assert found.id == key.id
    (listed,) = store.accounts.list()
    assert {key.id for key in listed.keys} == {key.id for key, _ in made}
    assert [member.name for member in store.projects.members("vision")] == ["ci"]
    store.accounts.delete("ci")
    assert store.projects.members("vision") == []


def test_an_account_is_disabled_and_enabled_as_one(store: Store) -> None:
    account = store.accounts.create("ci", ["submit"])
    made = [store.keys.create_for(account) for _ in range(3)]
    _, other = store.keys.create("ann", ["read"])
    credentials = [Credential(key.id) for key, _ in made]
    assert store.accounts.disable("ci").disabled
    assert [store.keys.verify(secret) for _, secret in made] == [None] * 3
    assert store.keys.ended(credentials) == set(credentials)
    assert store.keys.verify(other) is not None
    for attempt in (lambda: store.keys.create_for(account), lambda: store.keys.rotate(made[0][0].id, grace_s=60)):
        with pytest.raises(Conflict, match="disabled"):
            attempt()
    assert not store.accounts.enable("ci").disabled
    assert all(store.keys.verify(secret) for _, secret in made)
    assert store.keys.ended(credentials) == set()


def test_a_rotated_key_stays_the_accounts(store: Store) -> None:
    key, secret = store.keys.create_for(store.accounts.create("ci", ["read"]))
    successor, fresh = store.keys.rotate(key.id, grace_s=60)
    assert successor.holder == "account"
    store.accounts.disable("ci")
    assert store.keys.verify(secret) is None
    assert store.keys.verify(fresh) is None


def test_a_key_that_is_revoked_leaves_nothing_behind(store: Store, redis: redis_py.Redis) -> None:
    key, _ = store.keys.create_for(store.accounts.create("ci", ["read"]))
    store.accounts.disable("ci")
    store.keys.revoke(key.id)
    store.accounts.enable("ci")
    assert store.accounts.get("ci").keys == ()
    store.accounts.delete("ci")
    assert redis.keys("trivet:keys*") == [b"trivet:keys:pepper"]
    assert Snapshot(redis).strays() == []


def test_the_end_of_an_account_is_that_of_its_keys(store: Store) -> None:
    account = store.accounts.create("ci", ["submit"])
    _, secret = store.keys.create_for(account)
    assert store.accounts.delete("ci") == 1
    assert store.keys.verify(secret) is None
    assert store.accounts.list() == []
    for attempt in (
        lambda: store.accounts.delete("ci"),
        lambda: store.accounts.disable("ci"),
        lambda: store.keys.create_for(account),
    ):
        with pytest.raises(NotFound):
            attempt()


def test_a_name_is_an_accounts_or_a_keys(store: Store) -> None:
    store.accounts.create("ci", ["submit"])
    store.keys.create("ann", ["submit"])
    with pytest.raises(Conflict, match="is a service account"):
        store.keys.create("ci", ["submit"])
    for taken in ("ann", "ci"):
        with pytest.raises(Conflict):
            store.accounts.create(taken, ["submit"])
    with pytest.raises(Conflict, match="name of a service account"):
        store.keys.admit(Person("oidc-1", "ci", ("admin",), None), life_s=60)
    assert [key.name for key in store.keys.list()] == ["ann"]


def test_keys_of_an_account_expire(store: Store) -> None:
    account = store.accounts.create("ci", ["submit"])
    key, _ = store.keys.create_for(account, expires_at=datetime.now(UTC) + timedelta(days=1))
    assert key.expires_at is not None
    with pytest.raises(Rejected, match="has passed"):
        store.keys.create_for(account, expires_at=datetime.now(UTC) - timedelta(days=1))


@pytest.mark.parametrize(("scopes", "project"), [([], None), (["root"], None), (["read"], "No Project")])
def test_bad_accounts_are_refused(store: Store, scopes: Any, project: str | None) -> None:
    with pytest.raises(Rejected):
        store.accounts.create("ci", scopes, project)
    assert store.accounts.list() == []
