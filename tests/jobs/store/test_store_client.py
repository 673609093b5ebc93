"""The way to Redis: outages, lost script caches, and scripts whose stubs disagree with them."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import redis as redis_py
from store_builders import train

from service.jobs.files import DataLayout
from service.jobs.host.embedded_broker import EmbeddedBroker
from service.jobs.records import AttemptRef
from service.jobs.store import Store, StoreUnavailable
from service.jobs.store import scripts as store_scripts
from service.jobs.store.client import BrokerClient
from service.jobs.store.keyspace import KEYS
from service.jobs.store.outage import BrokerTimeouts
from service.jobs.store.scripts import HeaderMismatch, Script

REF = AttemptRef("job_" + "0" * 20, 1, "a")


def test_no_server_is_store_unavailable(tmp_path: Path, data: DataLayout) -> None:
    store = Store.connect(f"unix://{tmp_path}/nothing.sock", data)
    for call in (
        store.attempts.place,
        lambda: store.attempts.renew(REF),
        lambda: store.jobs.submit(train(), "ada"),
        lambda: store.events.page(REF.job_id),
        lambda: store.keys.verify("tvt_a_b"),
        lambda: store.files.add([b"x"], "text/plain"),
    ):
        with pytest.raises(StoreUnavailable, match="does not answer"):
            call()


def test_a_server_that_never_answers_is_store_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = BrokerClient(f"redis://127.0.0.1:{silent.getsockname()[1]}", BrokerTimeouts(reply_s=0.05))
        with pytest.raises(StoreUnavailable):
            client.call("PING")


def test_the_store_comes_back_with_its_server(tmp_path: Path, data: DataLayout) -> None:
    """Also the scripts: a restarted server has forgotten them."""
    folder = tmp_path / "broker"
    with EmbeddedBroker.start(folder) as broker:
        store = Store.connect(broker.url, data)
        job, _ = store.jobs.submit(train(), "ada")
    with pytest.raises(StoreUnavailable):
        store.jobs.get(job.id)
    with EmbeddedBroker.start(folder):
        assert store.jobs.get(job.id) == job
        assert store.jobs.cancel(job.id).state == "cancelled"
    store.close()


def test_a_server_that_cannot_write_is_store_unavailable(store: Store, redis: redis_py.Redis) -> None:
    redis.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreUnavailable, match="cannot take this"):
            store.jobs.submit(train(), "ada")
    finally:
        redis.config_set("maxmemory", "0")
    assert redis.dbsize() == 0


def test_scripts_are_sent_again_when_the_server_forgot_them(store: Store, redis: redis_py.Redis) -> None:
    store.jobs.submit(train(), "ada")
    redis.script_flush()
    store.jobs.submit(train(), "ada")
    assert len(store.jobs.list().items) == 2


def test_errors_of_our_own_making_are_not_hidden(broker: str, store: Store) -> None:
    with pytest.raises(redis_py.ResponseError, match="unknown command"):
        BrokerClient(broker).call("NONSENSE")


def test_one_store_serves_many_threads(store: Store) -> None:
    names: list[str] = []

    def work() -> None:
        names.extend(store.jobs.submit(train(), "ada")[0].id for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 80


def other_name(other: str) -> list[str]: ...


def too_many(job_id: str, more: int) -> list[str]: ...


def other_type(job_id: int) -> list[str]: ...


@pytest.mark.parametrize("stub", [other_name, too_many, other_type])
def test_a_stub_that_disagrees_with_its_script_fails_at_import(stub: object) -> None:
    with pytest.raises(HeaderMismatch, match=r"lua/get\.lua"):
        Script("get", frozenset(), stub)  # type: ignore[arg-type,var-annotated]


def test_every_script_has_a_stub_and_every_library_a_user() -> None:
    folder = Path(store_scripts.__file__).parent / "lua"
    stubs = (folder.parent / "stubs.py").read_text()
    scripts = sorted(path.stem for path in folder.glob("*.lua"))
    assert scripts
    assert [name for name in scripts if f'@script("{name}", ' not in stubs] == []
    used = " ".join(path.read_text() for path in folder.glob("*.lua"))
    assert all(path.stem in used for path in folder.glob("lib/*.lua"))


def test_key_families_do_not_swallow_each_other() -> None:
    """A key made by one family is recognised, and its parts cannot make it a key of a family that expires."""
    for key in KEYS:
        name = key(*["part"] * key.template.count("{}"))
        assert key.pattern.fullmatch(name)
        families = {each.lifetime for each in KEYS if each.pattern.fullmatch(name)}
        assert families == {key.lifetime}
