"""A whole service on this machine's GPUs, started once for a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from running_service import LIMIT_S, Service, start, stop

GPUS = torch.cuda.device_count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder needs a GPU."""
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.cuda)
            item.add_marker(pytest.mark.timeout(LIMIT_S))
            if not GPUS:
                item.add_marker(pytest.mark.skip(reason="needs a GPU; this machine has none"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    visible = ",".join(map(str, range(GPUS)))
    # A file has dozens of jobs: they are forked, as a user's are.
    set_here = {"CUDA_VISIBLE_DEVICES": visible, "TRIVET_CPU_SLOTS": "4", "TRIVET_WARM_SUPERVISORS": "1"}
    running = start(tmp_path_factory.mktemp("service") / "data", **set_here)
    yield running
    stop(running)
