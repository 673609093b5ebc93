"""Benchmarks run rarely, and tests import within functions that only ranks call: what they take from us exists."""

from __future__ import annotations

import ast
import importlib
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("api", "service", "trivet", "workers")
FILES = sorted(path for room in ("benchmarks", "tests") for path in (ROOT / room).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each ``from … import …`` of our packages, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            yield from ((node.module, alias.name) for alias in node.names)


def exists(module: str, name: str) -> bool:
    """Of a module that needs an optional package which is not installed, nothing is known."""
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return error.name is not None and error.name.split(".")[0] not in PACKAGES
    return True


def test_what_benchmarks_and_tests_import_exists() -> None:
    entries = [(str(path.relative_to(ROOT)), *entry) for path in FILES for entry in imported(path)]
    assert [entry for entry in entries if not exists(*entry[1:])] == []


def all_imported(path: Path) -> Iterator[str]:
    """Yield every module that a file names, with each name that it takes from one, which may be a module too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_types_of_what_is_imported_are_known() -> None:
    """A module that mypy is told not to read has no types, so every mistake in its use would pass."""
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    skipped = [
        pattern
        for override in configured["overrides"]
        if override.get("follow_imports") == "skip"
        for pattern in override["module"]
    ]
    checked = [path for room in configured["files"] for path in (ROOT / room).rglob("*.py")]
    found = {(str(path.relative_to(ROOT)), name) for path in checked for name in all_imported(path)}
    assert skipped
    assert {(path, name) for path, name in found if any(fnmatch(f"{name}.", pattern) for pattern in skipped)} == set()
