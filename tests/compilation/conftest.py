"""One thread for each test; the ladder as a fixture; a heap that is quickly searched."""

from __future__ import annotations

from collections.abc import Iterator

import ladder_runs
import pytest
from one_thread import one_thread
from set_aside import _quick_to_search, _set_aside  # noqa: F401 - fixtures


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def ascend() -> ladder_runs.Ascend:
    """Return what runs a program up the ladder: ``ascend(program, rungs, phases)``."""
    return ladder_runs.ascend
