"""Real torchrun groups on gloo, and one thread per process: results must not depend on how a sum is cut."""

from collections.abc import Iterator

import pytest
import torch
from launching import torchrun

__all__ = ["torchrun"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
