"""Benchmarks run rarely, and on other machines: what they take from the packages exists."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "service", "trivet", "workers")


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each ``from … import …`` of our packages."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_exists(path: Path) -> None:
    for module, name in imported(path):
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")
