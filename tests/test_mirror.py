"""Tests lie where the code lies that they are about, and share what helps them through modules that hold no tests."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("test_*.py"))


OF_SEVERAL_ROOMS = {"browser", "cli", "distributed", "docs", "e2e", "faults", "formats", "security"}
"""Folders of tests that are about what several rooms, or all of them, do together."""


def has_home(folder: Path) -> bool:
    """Whether the code has a folder of this name, or the tests are about several."""
    name = folder.relative_to(TESTS)
    homes = (TESTS.parent, TESTS.parent / "service")
    return name == Path() or str(name) in OF_SEVERAL_ROOMS or any((home / name).is_dir() for home in homes)


def test_folders_of_tests_are_named_after_folders_of_the_code() -> None:
    assert [folder for folder in {path.parent for path in FILES} if not has_home(folder)] == []
    assert not has_home(TESTS / "trainings")
    assert not has_home(TESTS / "bounds" / "nothing")


def test_no_module_of_tests_is_imported() -> None:
    names = {path.stem for path in FILES}
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            else:
                continue
            found += [f"{path.relative_to(TESTS)}: {module}" for module in modules if module.split(".")[-1] in names]
    assert found == []
