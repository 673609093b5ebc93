"""Fixtures of the verification tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

GROUPS = Path(__file__).parents[1] / "distributed" / "conftest.py"


def _groups() -> Any:
    """The launcher of real torchrun groups, which belongs to the distributed tests."""
    name = "torchrun_groups"
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, GROUPS)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        specification.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def torchrun(tmp_path: Path) -> Any:
    folder = tmp_path / "torchrun"
    folder.mkdir()
    return _groups().Torchrun(folder)


@pytest.fixture(scope="session")
def parity() -> Path:
    """Networks with another verifier's bounds: data that is kept outside of the repository."""
    shared = Path(os.environ.get("TRIVET_SHARED", Path(__file__).parents[3] / "shared"))
    if not (shared / "parity").is_dir():
        pytest.skip("the parity data (TRIVET_SHARED/parity) is not on this machine; it is not part of the repository")
    return shared / "parity"
