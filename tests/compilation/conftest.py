"""One thread for each test; climbing as a fixture."""

from __future__ import annotations

from collections.abc import Iterator

import climbing
import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ascend() -> climbing.Climb:
    """``ascend(program, rungs, phases)`` climbs."""
    return climbing.ascend
