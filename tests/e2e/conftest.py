"""The whole service of the end-to-end tests, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_service import Service, start, stop


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = start(tmp_path_factory.mktemp("service") / "data")
    yield running
    stop(running)
