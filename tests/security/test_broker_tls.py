"""TLS to the broker: each of our clients looks at the certificate before it says its password."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from kombu.exceptions import OperationalError
from lanes import first_fast
from network_broker import PASSWORDS, NetworkBroker, network_broker
from tls_front import PAST, Front, server_context

from service.jobs.files import DataLayout
from service.jobs.records import AttemptRef
from service.jobs.settings import Settings
from service.jobs.store import BrokerRefused, Store, StoreUnavailable
from service.jobs.store.tail import StreamTail
from workers.agent.celery_app import Dispatcher, create_app

SECRET = PASSWORDS["host-gpu.1"]
REF = AttemptRef("job_" + "0" * 20, 1, "a")
OURS = trustme.CA()
GOOD = OURS.issue_cert("localhost", "127.0.0.1")

Client = Callable[[str, DataLayout], Any]


def by_the_store(url: str, data: DataLayout) -> None:
    store = Store.connect(url, data)
    try:
        store.attempts.place()
    finally:
        store.close()


def by_the_stream(url: str, _data: DataLayout) -> None:
    async def read() -> None:
        tail = StreamTail.connect(url)
        try:
            await tail.last_id(REF.job_id)
        finally:
            await tail.close()

    asyncio.run(read())


def by_celery(url: str, _data: DataLayout) -> None:
    app = create_app(url)
    try:
        Dispatcher(app).send(REF)
    finally:
        app.close()


CLIENTS: tuple[Client, ...] = (by_the_store, by_the_stream, by_celery)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NetworkBroker, Path]]:
    folder = tmp_path_factory.mktemp("deployed")
    OURS.cert_pem.write_to_path(str(folder / "ca.pem"))
    with network_broker(folder) as running:
        yield running, folder


def url_of(front: Front, folder: Path, **fields: Any) -> str:
    """What a worker's settings make of an address and a password."""
    given = {
        "redis_url": f"rediss://localhost:{front.port}/0",
        "broker_user": "host-gpu.1",
        "broker_password": SECRET,
        "broker_ca_cert": folder / "ca.pem",
    }
    return Settings.model_validate(given | fields).broker_url


@pytest.mark.parametrize("client", CLIENTS)
def test_a_broker_with_the_right_certificate_is_spoken_to(
    client: Client, deployed: tuple[NetworkBroker, Path], data: DataLayout
) -> None:
    _, folder = deployed
    with Front(server_context(GOOD), folder / "admin.sock").running() as front:
        client(url_of(front, folder), data)
        assert SECRET.encode() in front.heard


@pytest.mark.parametrize("client", first_fast(1, CLIENTS))
@pytest.mark.parametrize(
    ("certificate", "said"),
    [
        (trustme.CA().issue_cert("localhost", "127.0.0.1"), "certificate verify failed"),
        pytest.param(
            OURS.issue_cert("localhost", not_before=PAST, not_after=PAST.replace(month=2)),
            "certificate has expired",
            marks=pytest.mark.slow,
        ),
        (OURS.issue_cert("elsewhere.example"), "not valid for 'localhost'"),
        pytest.param(None, "wrong version number|record layer failure", marks=pytest.mark.slow),
    ],
    ids=["wrong authority", "expired", "wrong name", "no TLS"],
)
def test_no_password_is_said_to_any_other(
    client: Client,
    certificate: trustme.LeafCert | None,
    said: str,
    deployed: tuple[NetworkBroker, Path],
    data: DataLayout,
) -> None:
    _, folder = deployed
    context = None if certificate is None else server_context(certificate)
    with Front(context, folder / "admin.sock").running() as front:
        with pytest.raises((BrokerRefused, OperationalError), match=f"(?i){said}"):
            client(url_of(front, folder), data)
        assert b"AUTH" not in front.heard
        assert SECRET.encode() not in front.heard
        assert (certificate is None) == bool(front.heard)


@pytest.mark.parametrize("client", first_fast(1, CLIENTS))
def test_a_broker_may_ask_for_a_certificate(
    client: Client, deployed: tuple[NetworkBroker, Path], data: DataLayout, tmp_path: Path
) -> None:
    _, folder = deployed
    mine = OURS.issue_cert("worker.example")
    mine.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    mine.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    files = {"broker_tls_cert": tmp_path / "cert.pem", "broker_tls_key": tmp_path / "key.pem"}
    with Front(server_context(GOOD, clients=OURS), folder / "admin.sock").running() as front:
        with pytest.raises((StoreUnavailable, OperationalError)):
            client(url_of(front, folder), data)
        assert not front.heard
    with Front(server_context(GOOD, clients=OURS), folder / "admin.sock").running() as front:
        client(url_of(front, folder, **files), data)
        assert SECRET.encode() in front.heard


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    given = {"redis_url": "rediss://broker", "broker_ca_cert": tmp_path / "nowhere.pem"}
    with pytest.raises(FileNotFoundError, match=r"TRIVET_BROKER_CA_CERT=.*nowhere\.pem"):
        _ = Settings.model_validate(given).broker_url
