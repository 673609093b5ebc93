"""A broker for the tests of one folder, whose service lives as long as the session.

On the broker that all tests share it would go on with its own work, such as sending webhooks, while the tests of other
folders run. A folder's ``conftest`` imports the fixture, which then stands in for the shared one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.jobs.host.embedded_broker import EmbeddedBroker


@pytest.fixture(scope="session", name="broker")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of the folder's own server."""
    with EmbeddedBroker.start(tmp_path_factory.mktemp("own-broker"), fsync="everysec") as server:
        yield server.url
