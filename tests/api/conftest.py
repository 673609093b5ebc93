"""An application over a real broker, clients by scope, a fake worker, and a real server for streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis as redis_py
import uvicorn
from api_world import Keys, Server, Worker, bearer, wait_until
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr

from api.main import create_app
from service.jobs.layout import DataLayout
from service.jobs.settings import Settings
from service.jobs.store import Store

@pytest.fixture
def settings(broker: str, data: DataLayout) -> Settings:
    return Settings(
        data=data.root, redis_url=SecretStr(broker), max_file_bytes=100_000, max_streams=8, max_streams_per_key=4
    )


@pytest.fixture
def store(redis: redis_py.Redis, settings: Settings) -> Iterator[Store]:
    connected = Store.connect(settings.broker_url, settings.layout)
    yield connected
    connected.close()


@pytest.fixture
def app(settings: Settings, store: Store) -> FastAPI:
    return create_app(settings, store)


@pytest.fixture
def keys(store: Store) -> Keys:
    return Keys(store)


@pytest.fixture
def anonymous(app: FastAPI) -> Iterator[TestClient]:
    """A client without a key; its server's exceptions become answers."""
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def client(anonymous: TestClient, keys: Keys) -> TestClient:
    """A client with an admin key."""
    anonymous.headers.update(bearer(keys["admin"]))
    return anonymous


@pytest.fixture
def worker(store: Store) -> Worker:
    return Worker(store)


@pytest.fixture
def server(app: FastAPI) -> Iterator[Server]:
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=5)
    running = uvicorn.Server(config)
    listening = config.bind_socket()
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    wait_until(lambda: running.started)
    yield Server(f"http://127.0.0.1:{listening.getsockname()[1]}", running, app)
    app.state.context.hub.close_soon()
    running.should_exit = True
    thread.join(10)
    assert not thread.is_alive()
