"""A small trained model that verification jobs are about."""

from __future__ import annotations

import pytest
from verify_jobs import train

from service.jobs.files import DataLayout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> DataLayout:
    """The data of a short training run on digits."""
    data = DataLayout(tmp_path_factory.mktemp("data"))
    train(data)
    return data
