"""One thread for each test; the ladder as a fixture; a heap that is quickly searched."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import ladder_runs
import pytest
from one_thread import one_thread


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def _imports_set_aside() -> Iterator[None]:
    """Hide from the collector what was imported before the module's tests.

    The monitor searches all objects that the collector knows for those that hold a result; what has been imported holds
    none of what the tests' programs will compute, and there are a million of them.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def ascend() -> ladder_runs.Ascend:
    """Return what runs a program up the ladder: ``ascend(program, rungs, phases)``."""
    return ladder_runs.ascend
