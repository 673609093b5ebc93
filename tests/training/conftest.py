"""One thread per process: results must not depend on how a sum is cut."""

import logging
from collections.abc import Iterator

import pytest
from one_thread import one_thread

# DCP logs every tensor at debug level, which pytest would show in full with each failure.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
