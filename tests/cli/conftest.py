"""One server for the room; an empty database for each test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis as redis_py
from cli_world import Cli, Worker, serving, settings_for
from command_server import CommandServer
from own_broker import own_broker

from service.jobs.settings import Settings
from service.jobs.store import Store
from trivet.client import Client

__all__ = ["own_broker"]


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Commands under test obey Ctrl-C even where the tests themselves were started in the background, ignoring it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cli_settings(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return settings_for(broker, tmp_path_factory.mktemp("cli-data"))


@pytest.fixture(scope="session")
def cli_store(cli_settings: Settings) -> Iterator[Store]:
    store = Store.connect(cli_settings.broker_url, cli_settings.layout)
    yield store
    store.close()


@pytest.fixture(scope="session")
def url(cli_settings: Settings, cli_store: Store) -> Iterator[str]:
    with serving(cli_settings, cli_store) as address:
        yield address


@pytest.fixture
def store(redis: redis_py.Redis, cli_store: Store) -> Store:
    return cli_store


@pytest.fixture
def worker(store: Store) -> Worker:
    return Worker(store)


@pytest.fixture
def secret(store: Store) -> str:
    return store.keys.create("admin", ("admin",))[1]


@pytest.fixture(scope="session")
def command_server() -> Iterator[CommandServer]:
    server = CommandServer.begin()
    yield server
    server.end()


@pytest.fixture
def trivet(url: str, secret: str, tmp_path: Path, command_server: CommandServer) -> Cli:
    return Cli(tmp_path, {"TRIVET_URL": url, "TRIVET_KEY": secret}, command_server)


@pytest.fixture
def client(url: str, secret: str) -> Iterator[Client]:
    with Client(url, secret) as opened:
        yield opened
