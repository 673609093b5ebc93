"""Fixtures of the tests of scripts, which run in confinement or not at all."""

import pytest
from worker_fleet import fleet, limits

from workers.launcher import confinement

__all__ = ["fleet", "limits"]


@pytest.fixture(scope="session")
def confined() -> None:
    if not {"files", "broker", "network"} <= set(confinement.available()):
        pytest.skip("this host does not allow what scripts need")
