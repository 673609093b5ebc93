"""A heap that is quickly searched: what was there before a test is hidden from the collector.

Whoever looks for the holders of a result searches all objects that the collector knows. What has been imported, and
what earlier tests have compiled, holds none of what a test will compute, and there are millions of them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def set_aside() -> None:
    gc.collect()
    gc.freeze()


@contextmanager
def quick_to_search() -> Iterator[None]:
    """Hide what is there; show it again at the end, unless something was hidden before, by the process that forked
    this one.
    """
    hidden = gc.get_freeze_count()
    set_aside()
    yield
    if not hidden:
        gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _quick_to_search() -> Iterator[None]:
    """Fixture of a folder's conftest.py: hide what is there from each module of tests."""
    with quick_to_search():
        yield


@pytest.fixture(autouse=True)
def _set_aside(_quick_to_search: None) -> None:
    """Fixture of a folder's conftest.py: hide what earlier tests have made."""
    set_aside()


@contextmanager
def nothing_set_aside() -> Iterator[None]:
    """Show the collector all objects: a closure was made when its module was imported."""
    gc.unfreeze()
    try:
        yield
    finally:
        gc.freeze()
