"""An application over a real broker, clients by scope, a fake worker, and a real server for streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis as redis_py
from api_world import Keys, Server, Worker, bearer, serving
from fastapi import FastAPI
from fastapi.testclient import TestClient
from own_broker import own_broker
from pydantic import SecretStr
from waiting import eventually

from api.main import create_app
from service.jobs.settings import Settings
from service.jobs.store import Store

__all__ = ["own_broker"]


@pytest.fixture(scope="session")
def settings(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(
        data=tmp_path_factory.mktemp("api-data"),
        redis_url=SecretStr(broker),
        max_file_bytes=100_000,
        allowed_hosts="testserver",
        max_streams=8,
        max_streams_per_key=4,
    )


@pytest.fixture(scope="session")
def connected(settings: Settings) -> Iterator[Store]:
    store = Store.connect(settings.broker_url, settings.layout, settings.store_limits)
    yield store
    store.close()


@pytest.fixture
def store(redis: redis_py.Redis, connected: Store) -> Store:
    """A store on an empty database."""
    return connected


@pytest.fixture(scope="session")
def app(settings: Settings, connected: Store) -> FastAPI:
    return create_app(settings, connected)


@pytest.fixture
def keys(store: Store) -> Keys:
    return Keys(store)


@pytest.fixture(scope="session")
def running(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def anonymous(running: TestClient, store: Store) -> TestClient:
    """A client without a key; its server's exceptions become answers."""
    running.headers.pop("Authorization", None)
    running.cookies.clear()
    return running


@pytest.fixture
def client(anonymous: TestClient, keys: Keys) -> TestClient:
    """A client with an admin key."""
    anonymous.headers.update(bearer(keys["admin"]))
    return anonymous


@pytest.fixture
def worker(store: Store) -> Worker:
    return Worker(store)


@pytest.fixture(scope="session")
def served(settings: Settings, connected: Store) -> Iterator[Server]:
    with serving(settings, connected) as server:
        yield server


@pytest.fixture
def server(served: Server, store: Store) -> Iterator[Server]:
    """One for all tests, on an empty database, without streams of an earlier test."""
    yield served
    eventually(lambda: served.app.state.context.hub.open_streams == 0)
