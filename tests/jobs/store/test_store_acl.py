"""The broker's users: what the API and hosts may do, asked of a real server with the list that is written for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import pytest
import redis as redis_py
from network_broker import PASSWORDS, NetworkBroker, network_broker
from store_builders import DONE, LIMITS, LOG, train

from service.jobs.files import DataLayout
from service.jobs.records import Artifact
from service.jobs.store import BrokerRefused, HostReport, Store, acl, stubs
from service.jobs.store.keyspace import (
    ACCOUNTS,
    API_KEYS,
    AUDIT,
    FILES,
    IDEMPOTENCY,
    KEYS,
    PEPPER,
    SESSION,
    SESSION_TICKET,
    SIGN_INS,
    UPLOADS,
    WEBHOOK_SECRETS,
    WEBHOOKS,
)
from service.jobs.store.scripts import Script

SCRIPTS: dict[str, Script[..., Any]] = {
    value.name: value for value in vars(stubs).values() if isinstance(value, Script)
}
ROLES = {"api": acl.API_SCRIPTS, "host": acl.HOST_SCRIPTS}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkBroker]:
    with network_broker(tmp_path_factory.mktemp("deployed")) as running:
        yield running


@pytest.fixture
def connect(deployed: NetworkBroker, data: DataLayout) -> Iterator[Callable[[str], Store]]:
    deployed.admin.flushall()
    deployed.admin.execute_command("ACL", "LOG", "RESET")
    stores: list[Store] = []

    def connected(user: str) -> Store:
        stores.append(Store.connect(deployed.url(user), data, LIMITS))
        return stores[-1]

    yield connected
    for store in stores:
        store.close()


def may(deployed: NetworkBroker, user: str, *words: str) -> bool:
    """What the server itself says, without running the command."""
    answer: Any = deployed.admin.execute_command("ACL", "DRYRUN", user, *words)
    return bool(answer == b"OK")


def may_give(deployed: NetworkBroker, user: str, command: str, key: str = "trivet:clock") -> bool:
    """Whether a command is allowed, with as many arguments as it needs at least."""
    info: Any = deployed.admin.execute_command("COMMAND", "INFO", command)
    needed = abs(info[command.lower()]["arity"]) - 1
    return may(deployed, user, command, *[key, *["1"] * needed][:needed])


def keys_of(script: Script[..., Any]) -> list[str]:
    return ["trivet:" + key.template.replace("{}", "x") for key in KEYS if key.name in script.keys]


def test_every_script_has_callers_whose_rules_follow_from_it() -> None:
    """A new one names them at its stub: "host" if agents or supervisors call it, "api" if the API does. Only constant
    words are read out of the scripts, so there is nothing else in them."""
    assert SCRIPTS.keys() ^ {script.name for scripts in ROLES.values() for script in scripts} == set()
    for path in (resources.files("service.jobs.store") / "lua").iterdir():
        text = path.read_text() if path.is_file() else "".join(each.read_text() for each in path.iterdir())
        assert not re.findall(r'redis\.p?call\((?!\s*")|redis\.pcall|KEY\[|(?<!\.)\bKEY\b(?!\.)', text), path.name


@pytest.mark.parametrize("user", PASSWORDS)
def test_each_role_may_do_all_that_its_scripts_do(deployed: NetworkBroker, user: str) -> None:
    for script in ROLES[user.partition("-")[0]]:
        denied = [word for word in script.commands if not may_give(deployed, user, word)]
        assert denied == [], script.name
        assert [key for key in keys_of(script) if not may_give(deployed, user, "SET", key)] == [], script.name


@pytest.mark.parametrize(
    "family",
    [
        ACCOUNTS,
        API_KEYS,
        PEPPER,
        SESSION,
        SESSION_TICKET,
        SIGN_INS,
        FILES,
        UPLOADS,
        AUDIT,
        IDEMPOTENCY,
        WEBHOOKS,
        WEBHOOK_SECRETS,
    ],
    ids=lambda family: family.name,
)
def test_a_host_neither_reads_nor_writes_what_admits_people(deployed: NetworkBroker, family: Any) -> None:
    key = "trivet:" + family.template.replace("{}", "x")
    words = ("GET", "SET", "HGET", "HSET", "HGETALL", "DEL", "ZADD", "LPUSH", "SADD", "PEXPIRE")
    assert [word for word in words if may_give(deployed, "host", word, key)] == []
    assert may_give(deployed, "api", "SET", key)


@pytest.mark.parametrize(
    "words",
    [
        "FLUSHALL", "FLUSHDB", "SCRIPT FLUSH", "SCRIPT KILL", "FUNCTION FLUSH", "CONFIG SET save x", "CONFIG REWRITE",
        "ACL LIST", "ACL SETUSER host", "ACL GETUSER api", "DEBUG SLEEP 1", "SHUTDOWN", "KEYS *", "MONITOR",
        "CLIENT LIST", "CLIENT KILL ID 1", "REPLICAOF NO ONE", "SAVE", "SWAPDB 0 1", "MIGRATE a 1 b 0 1",
    ],
)  # fmt: skip
def test_nobody_administers_the_broker(deployed: NetworkBroker, words: str) -> None:
    assert [user for user in (*PASSWORDS, "probe") if may(deployed, user, *words.split())] == []


def test_whoever_has_no_password_may_ask_whether_the_broker_answers_and_nothing_else(deployed: NetworkBroker) -> None:
    with redis_py.Redis(port=deployed.port) as nobody, pytest.raises(redis_py.AuthenticationError):
        nobody.ping()
    with redis_py.Redis(port=deployed.port, username="probe", password="any") as probe:
        assert probe.ping()
        with pytest.raises(redis_py.exceptions.NoPermissionError):
            probe.get("trivet:clock")


def test_the_api_and_hosts_do_their_work_as_their_users(
    deployed: NetworkBroker, connect: Callable[[str], Store]
) -> None:
    """A job from its submission to its end, and all that is asked about it: the server has refused nothing."""
    api, host = connect("api"), connect("host-gpu.1")
    secret = api.keys.ensure_admin()
    assert secret is not None
    assert api.keys.verify(secret) is not None
    host.hosts.beat(HostReport("a", "127.0.0.1", cpu_slots=2))
    job, _ = api.jobs.submit(train(), "ada", idempotency_key="one")
    assert host.attempts.place() == [job.id]
    (ref,) = host.attempts.due()
    host.attempts.claim(ref, "supervisor")
    assert host.attempts.renew(ref) == "run"
    host.attempts.emit(ref, [LOG])
    made = Artifact(name="w", media_type="text/plain", bytes=1, sha256="0" * 64, created_at=job.created_at)
    host.attempts.record_artifact(ref, made)
    assert host.artifacts.list(job.id)
    assert host.events.page(job.id).items
    host.attempts.finish(ref, DONE)
    assert host.attempts.reap() == []
    assert host.jobs.expire(-60.0) == (job.id,)
    assert host.hosts.list()[0].name == "a"
    host.hosts.leave("a")
    assert api.gauges.round_trip_s() > 0
    assert api.survives_power_loss() in {True, False}
    log: Any = deployed.admin.execute_command("ACL", "LOG")
    assert log == []


def test_a_hosts_password_makes_no_admin_key_and_reads_none(
    deployed: NetworkBroker, connect: Callable[[str], Store]
) -> None:
    """Neither by a command nor by a script, whose commands are checked as the user's own."""
    connect("api").keys.ensure_admin()
    host = connect("host")
    for attack in (
        lambda: host.keys.create("mallory", ["admin"]),
        host.keys.list,
        host.keys.ensure_admin,
        lambda: host.keys.verify("tvt_a_b"),
        lambda: host.jobs.submit(train(), "mallory"),
        lambda: host.client.call("EVAL", "return redis.call('HGETALL', 'trivet:keys')", 0),
    ):
        with pytest.raises(BrokerRefused, match="does not let this user"):
            attack()
    assert [key.name for key in connect("api").keys.list()] == ["admin"]


def test_a_wrong_password_is_told_apart_from_a_broker_that_is_away(deployed: NetworkBroker, data: DataLayout) -> None:
    store = Store.connect(f"redis://api:wrong@127.0.0.1:{deployed.port}/0", data)
    with pytest.raises(BrokerRefused, match="rejects this user or this password"):
        store.attempts.place()


@pytest.mark.parametrize(
    ("passwords", "said"),
    [
        ({"api": "a" * 32}, "api and host"),
        ({"host": "a" * 32, "host-b": "b" * 32}, "api and host"),
        ({"api": "a" * 32, "root": "b" * 32}, "'root' is not a user"),
        ({"api": "a" * 32, "host-": "b" * 32}, "'host-' is not a user"),
        ({"api": "a" * 32, "host\nuser x on nopass": "b" * 32}, "is not a user"),
        ({"api": "a" * 31, "host": "b" * 32}, "32 characters or more and no white space; it has 31"),
        ({"api": "a" * 32 + " b", "host": "b" * 32}, "no white space"),
    ],
)
def test_a_list_that_would_not_protect_is_refused(passwords: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        acl.access_list(passwords)
