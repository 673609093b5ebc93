"""Tests lie where the code lies that they are about, and share what helps them through modules that hold no tests."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("test_*.py"))


def room_of(folder: Path) -> Path | None:
    """Return the folder of the code that a folder of tests is named after, if it is named after a room."""
    name = folder.relative_to(TESTS)
    homes = [TESTS.parent / "service", TESTS.parent]
    return next((home / name for home in homes if name.parts and (home / name.parts[0]).is_dir()), None)


def test_folders_of_tests_are_named_after_folders_of_the_code() -> None:
    folders = {path.parent for path in FILES}
    strangers = [
        str(folder.relative_to(TESTS)) for folder in folders if (room := room_of(folder)) and not room.is_dir()
    ]
    assert strangers == []


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
