"""Keys that expire and are rotated, from the command line."""

from __future__ import annotations

import orjson
import redis as redis_py
from cli_world import Cli

from service.jobs.store import Store
from service.jobs.store.keyspace import API_KEYS


def test_keys_expire_and_are_rotated(trivet: Cli, store: Store) -> None:
    assert "2h or 7d" in trivet("keys", "create", "ann", "--expires", "soon").err
    trivet.ok("keys", "create", "ann", "--expires", "90d")
    (key,) = [key for key in store.keys.list() if key.name == "ann"]
    rotated = trivet.ok("keys", "rotate", key.id, "--grace", "1h", "--json").json
    assert store.keys.verify(rotated["secret"]) is not None
    listed = trivet.ok("keys", "list").out
    assert f"rotated to {rotated['id']}" in listed
    assert listed.count("never") >= 2, "the admin key's end, and the last use of a new key"
    assert "--grace" in trivet("keys", "rotate", rotated["id"], "--grace", "long").err


def test_a_key_near_its_end_is_told_on_standard_error(trivet: Cli, store: Store, redis: redis_py.Redis) -> None:
    made = trivet.ok("keys", "create", "ann", "--expires", "1d", "--scope", "read", "--json").json
    assert trivet("jobs", TRIVET_KEY=made["secret"]).err == ""
    entry = orjson.loads(redis.hget(API_KEYS(), made["id"]))
    redis.hset(API_KEYS(), made["id"], orjson.dumps({**entry, "created_at": 0}))
    warned = trivet("jobs", "--json", TRIVET_KEY=made["secret"])
    assert warned.json["items"] == []
    assert "the API key expires at" in warned.err
