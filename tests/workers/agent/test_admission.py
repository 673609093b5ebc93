"""What a worker cannot be is refused at its start, with what to change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import psutil
import pytest
import redis as redis_py

from service.jobs.files import DataLayout
from service.jobs.records.store_limits import StoreLimits
from service.jobs.settings import Settings
from service.jobs.store import HostReport, Store
from service.torch_internals.installed import InstalledTorch
from workers.agent.admission import CannotWork, address_of, check_admitted, usable_devices
from workers.agent.agent import Outage

ELSEWHERE = "redis://192.0.2.7:6379/0"
"""An address of the range for documents; nothing is sent there."""


def own_address() -> str:
    found = [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family.name == "AF_INET" and not entry.address.startswith("127.")
    ]
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]


@pytest.fixture
def store(broker: str, redis: redis_py.Redis, data: DataLayout) -> Iterator[Store]:
    store = Store.connect(broker, data, StoreLimits())
    yield store
    store.close()


GPUS = ("Test GPU", "Test GPU")


def test_a_torch_that_is_too_old_is_refused_at_the_start() -> None:
    with pytest.raises(CannotWork, match=r"^torch 2\.10\.0 is too old, .*: pip install"):
        usable_devices(InstalledTorch("2.10.0", "13.0"), GPUS, GPUS)


def test_a_torch_for_the_cpu_uses_no_gpu_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert usable_devices(InstalledTorch("2.13.0+cpu", None), GPUS, GPUS[:1]) == ()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "torch 2.13.0+cpu is built for the CPU and cannot use this host's 2 GPUs"
    ]
    assert usable_devices(InstalledTorch("2.13.0", "13.0"), GPUS, GPUS[:1]) == GPUS[:1]


@pytest.mark.parametrize("url", ["unix:///somewhere/broker.sock", "redis://127.0.0.1:6379/0", "redis://[::1]:6379/0"])
def test_beside_its_broker_a_worker_is_at_loopback(url: str) -> None:
    assert address_of(Settings(), url) in ("127.0.0.1", "::1")


def test_a_worker_is_where_it_reaches_its_broker_from() -> None:
    address = own_address()
    assert address_of(Settings(), f"redis://{address}:6379/0") == address
    assert address_of(Settings(worker_address=address), "redis://127.0.0.1:6379/0") == address


def test_loopback_is_refused_where_the_broker_is_elsewhere() -> None:
    address = own_address()
    with pytest.raises(CannotWork, match=f"reached only from this host.*Leave it out for {address}"):
        address_of(Settings(worker_address="127.0.0.1"), f"redis://{address}:6379/0")


@pytest.mark.parametrize("given", ["192.0.2.1", "no-address"])
def test_an_address_of_another_host_is_refused(given: str) -> None:
    with pytest.raises(CannotWork, match=r"leave TRIVET_WORKER_ADDRESS out for 127\.0\.0\.1"):
        address_of(Settings(worker_address=given), "redis://127.0.0.1:6379/0")


def test_a_name_that_another_worker_has_is_refused(store: Store) -> None:
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.02):
            store.hosts.beat(HostReport("alpha", "127.0.0.1", cpu_slots=1))

    store.hosts.beat(HostReport("alpha", "127.0.0.1", cpu_slots=1))
    other = threading.Thread(target=beat)
    other.start()
    try:
        with pytest.raises(CannotWork, match=r"another worker reports itself as 'alpha'.*TRIVET_WORKER_NAME"):
            check_admitted(store, Settings(worker_name="alpha"), "127.0.0.1", 0.5)
        check_admitted(store, Settings(worker_name="beta"), "127.0.0.1", 0.5)
    finally:
        over.set()
        other.join()


@pytest.mark.parametrize(("there", "here", "told"), [("127.0.0.1", "192.0.2.2", "alpha"), ("192.0.2.1", "::1", "beta")])
def test_one_host_at_loopback_beside_another_elsewhere_is_refused(
    store: Store, there: str, here: str, told: str
) -> None:
    store.hosts.beat(HostReport("alpha", there, cpu_slots=1))
    with pytest.raises(CannotWork, match=f"start the worker of {told} with TRIVET_WORKER_ADDRESS"):
        check_admitted(store, Settings(worker_name="beta"), here, 0.01)


def test_the_name_of_a_worker_that_was_killed_is_free(store: Store) -> None:
    store.hosts.beat(HostReport("alpha", "127.0.0.1", cpu_slots=1))
    check_admitted(store, Settings(worker_name="alpha"), "127.0.0.1", 0.05)


def test_an_outage_is_told_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            outage.note(OSError("refused"))
        outage.over()
        outage.over()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
