"""A heap that is quickly searched for holders of results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from set_aside import quick_to_search, set_aside


@pytest.fixture(scope="module", autouse=True)
def _quick_to_search() -> Iterator[None]:
    with quick_to_search():
        yield


@pytest.fixture(autouse=True)
def _set_aside(_quick_to_search: None) -> None:
    set_aside()
