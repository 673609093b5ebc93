"""Fixtures of the verification tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from verify_jobs import train

from service.jobs.layout import DataLayout


@pytest.fixture(scope="session")
def parity() -> Path:
    """Networks with another verifier's bounds: data that is kept outside of the repository."""
    shared = Path(os.environ.get("TRIVET_SHARED", Path(__file__).parents[3] / "shared"))
    if not (shared / "parity").is_dir():
        pytest.skip("the parity data (TRIVET_SHARED/parity) is not on this machine; it is not part of the repository")
    return shared / "parity"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> DataLayout:
    """The data of a short training run on digits."""
    data = DataLayout(tmp_path_factory.mktemp("data"))
    train(data)
    return data
