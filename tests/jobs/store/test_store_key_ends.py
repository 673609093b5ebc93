"""API keys that expire, and keys that give way to a successor."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import orjson
import pytest
import redis as redis_py
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import examples
from store_builders import at_once

from service.jobs.records import ApiKey, Conflict, NotFound, Rejected
from service.jobs.store import ApiKeys, Credential, Store
from service.jobs.store.keyspace import API_KEYS, CLOCK, SESSION

DAY_S = 86_400.0


def in_days(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def expire(redis: redis_py.Redis, key: ApiKey) -> None:
    """Let a key's end have passed."""
    entry = orjson.loads(redis.hget(API_KEYS(), key.id))
    redis.hset(API_KEYS(), key.id, orjson.dumps({**entry, "expires_at": entry["created_at"] - 1}))


def test_a_key_works_until_its_end(store: Store, redis: redis_py.Redis) -> None:
    end = in_days(90)
    key, secret = store.keys.create("ann", ["read"], expires_at=end)
    found = store.keys.verify(secret)
    assert found is not None
    assert found.expires_at is not None
    assert abs(found.expires_at - end) < timedelta(seconds=1)
    expire(redis, key)
    assert store.keys.verify(secret) is None
    assert [each.id for each in store.keys.list()] == [key.id]


def test_sessions_and_streams_end_with_the_key(store: Store, redis: redis_py.Redis) -> None:
    key, _ = store.keys.create("ann", ["read"], expires_at=in_days(90))
    other, _ = store.keys.create("bob", ["read"])
    session = store.sessions.begin(key)
    admitted = [
        store.sessions.credential(key, session.cookie), Credential(key.id), Credential(other.id),
    ]  # fmt: skip
    assert store.sessions.resume(session.cookie, page=session.page) is not None
    assert store.keys.ended(admitted) == set()
    expire(redis, key)
    assert store.keys.ended(admitted) == set(admitted[:2])
    assert store.sessions.resume(session.cookie, page=session.page) is None


def test_a_session_ends_with_its_time_where_no_worker_keeps_the_stores_clock_going(
    store: Store, redis: redis_py.Redis
) -> None:
    key, _ = store.keys.create("ann", ["read"])
    session = store.sessions.begin(key)
    (name,) = redis.scan_iter(SESSION("*"))
    redis.hincrby(name, "ends", -round(store.sessions.longest_s * 1000))
    redis.hset(CLOCK(), mapping={"now": 1, "wall": redis.time()[0] * 1000})
    assert store.sessions.resume(session.cookie, page=session.page) is None


def test_a_page_that_nobody_sees_keeps_no_session_alive(store: Store, redis: redis_py.Redis) -> None:
    key, _ = store.keys.create("ann", ["read"])
    session = store.sessions.begin(key)
    (name,) = redis.scan_iter(SESSION("*"))
    redis.pexpire(name, 60_000)
    assert store.sessions.resume(session.cookie, page=session.page, is_use=False) is not None
    assert redis.pttl(name) <= 60_000
    assert store.sessions.resume(session.cookie, page=session.page) is not None
    assert redis.pttl(name) > 60_000


def test_an_admin_key_that_expired_locks_nobody_out(store: Store, redis: redis_py.Redis) -> None:
    key, _ = store.keys.create("admin", ["admin"], expires_at=in_days(1))
    assert store.keys.ensure_admin() is None
    expire(redis, key)
    assert store.keys.ensure_admin() is not None
    assert store.keys.ensure_admin() is None


def test_keys_last_as_long_as_the_service_allows(store: Store) -> None:
    keys = ApiKeys(store.client, longest_s=30 * DAY_S)
    unlimited, _ = keys.create("ann", ["read"])
    assert unlimited.expires_at is not None
    assert abs(unlimited.expires_at - in_days(30)) < timedelta(minutes=1)
    assert keys.create("ann", ["read"], expires_at=in_days(30))[0].expires_at is not None
    with pytest.raises(Rejected, match="expires_at"):
        keys.create("ann", ["read"], expires_at=in_days(31))
    with pytest.raises(Rejected, match="has passed"):
        keys.create("ann", ["read"], expires_at=in_days(-1))
    long_lived, _ = store.keys.create("ann", ["read"], expires_at=in_days(300))
    successor, _ = keys.rotate(long_lived.id, grace_s=0)
    assert successor.expires_at is not None
    assert abs(successor.expires_at - in_days(30)) < timedelta(minutes=1)


def test_a_rotated_key_works_for_its_grace(store: Store, redis: redis_py.Redis) -> None:
    store.projects.create("vision")
    key, secret = store.keys.create("ann", ["submit"], "vision", expires_at=in_days(90))
    successor, fresh = store.keys.rotate(key.id, grace_s=3600)
    assert (successor.name, successor.scopes, successor.project) == (key.name, key.scopes, "vision")
    assert successor.expires_at is not None
    assert abs(successor.expires_at - in_days(90)) < timedelta(minutes=1)
    old, new = store.keys.verify(secret), store.keys.verify(fresh)
    assert old is not None
    assert new is not None
    assert old.expires_at is not None
    assert abs(old.expires_at - in_days(1 / 24)) < timedelta(minutes=1)
    assert (old.successor, new.successor) == (successor.id, None)
    expire(redis, key)
    assert store.keys.verify(secret) is None
    assert store.keys.verify(fresh) is not None


def test_without_grace_the_old_key_stops_at_once(store: Store) -> None:
    key, secret = store.keys.create("ann", ["read"])
    successor, fresh = store.keys.rotate(key.id, grace_s=0)
    assert store.keys.verify(secret) is None
    assert store.keys.ended([Credential(key.id), Credential(successor.id)]) == {Credential(key.id)}
    assert successor.expires_at is None
    assert store.keys.verify(fresh) is not None


def test_a_grace_prolongs_no_key(store: Store) -> None:
    key, secret = store.keys.create("ann", ["read"], expires_at=in_days(1))
    store.keys.rotate(key.id, grace_s=20 * DAY_S)
    found = store.keys.verify(secret)
    assert found is not None
    assert found.expires_at is not None
    assert found.expires_at < in_days(1.1)


def test_what_cannot_be_rotated_is_refused(store: Store, redis: redis_py.Redis) -> None:
    with pytest.raises(NotFound):
        store.keys.rotate("0" * 16, grace_s=0)
    key, _ = store.keys.create("ann", ["read"], expires_at=in_days(1))
    successor, _ = store.keys.rotate(key.id, grace_s=60)
    with pytest.raises(Conflict, match=successor.id):
        store.keys.rotate(key.id, grace_s=60)
    expire(redis, successor)
    with pytest.raises(Conflict, match="has expired"):
        store.keys.rotate(successor.id, grace_s=60)
    assert len(store.keys.list()) == 2


def test_a_key_has_one_successor_however_many_ask(store: Store) -> None:
    key, _ = store.keys.create("ann", ["read"])

    def ask() -> str | None:
        with suppress(Conflict):
            return store.keys.rotate(key.id, grace_s=60)[0].id
        return None

    assert len([each for each in at_once(ask) if each is not None]) == 1
    assert len(store.keys.list()) == 2


@settings(max_examples=examples(12, 40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.just(0.0) | st.floats(600, 30 * DAY_S), st.none() | st.floats(0.01, 400)), min_size=1, max_size=6
    ),
    st.none() | st.floats(0.01, 400),
    st.none() | st.floats(1, 100),
)
def test_of_a_row_of_rotations_only_the_newest_outlives_its_grace(
    store: Store, rotations: list[tuple[float, float | None]], first_days: float | None, longest_days: float | None
) -> None:
    longest_s = None if longest_days is None else longest_days * DAY_S
    keys = ApiKeys(store.client, longest_s)

    def end(days: float | None) -> datetime | None:
        return None if days is None else in_days(days if longest_days is None else min(days, longest_days))

    key, secret = keys.create("ann", ["read"], expires_at=end(first_days))
    for grace_s, days in rotations:
        before = {each.id: each.expires_at for each in keys.list()}
        successor, fresh = keys.rotate(key.id, grace_s=grace_s, expires_at=end(days))
        after = {each.id: each for each in keys.list()}
        old = after[key.id]
        assert old.expires_at is not None
        assert before[key.id] is None or old.expires_at <= before[key.id]
        assert old.expires_at <= datetime.now(UTC) + timedelta(seconds=grace_s)
        assert (keys.verify(secret) is None) == (old.expires_at <= datetime.now(UTC))
        if longest_days is not None:
            assert successor.expires_at is not None
            assert successor.expires_at <= in_days(longest_days) + timedelta(minutes=5)
        assert keys.verify(fresh) is not None
        key, secret = successor, fresh
