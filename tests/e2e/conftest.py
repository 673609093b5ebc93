"""The whole service of a file of end-to-end tests, started once: its agent and its broker are never quite idle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_service import Service, start, stop


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = start(tmp_path_factory.mktemp("service") / "data", TRIVET_WEBHOOK_ALLOW="127.0.0.1")
    yield running
    stop(running)
